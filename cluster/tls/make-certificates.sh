#!/bin/sh
# Make a certificate authority for one Dask cluster, and certificates of it for the scheduler, workers and clients.
#   ./make-certificates.sh [FOLDER] [DAYS]
set -eu
folder=${1:-certificates} days=${2:-365}

if [ -e "$folder" ]; then
    echo "$folder is there already; name another folder, or remove it if nothing uses its certificates." >&2
    exit 1
fi
umask 077
made=$(mktemp -d "$folder.XXXXXX") # what ends half-way leaves nothing with the name that was asked for
trap 'rm -rf "$made"' EXIT

quietly() { "$@" 2> "$made/log" || { cat "$made/log" >&2; exit 1; }; }

quietly openssl req -x509 -newkey rsa:3072 -nodes -sha256 -days "$days" -keyout "$made/ca.key" -out "$made/ca.pem" \
    -subj "/CN=dask certificate authority" -addext "basicConstraints=critical,CA:TRUE,pathlen:0" \
    -addext "keyUsage=critical,keyCertSign"

for role in scheduler worker client; do
    use=serverAuth,clientAuth # scheduler and workers are asked, and ask each other
    if [ $role = client ]; then use=clientAuth; fi
    cat > "$made/extensions" << EXTENSIONS
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage=$use
subjectAltName=DNS:dask-$role
EXTENSIONS
    quietly openssl req -newkey rsa:3072 -nodes -sha256 -keyout "$made/$role.key" -out "$made/request" \
        -subj "/CN=dask $role"
    quietly openssl x509 -req -sha256 -days "$days" -in "$made/request" -CA "$made/ca.pem" -CAkey "$made/ca.key" \
        -extfile "$made/extensions" -set_serial "0x$(openssl rand -hex 16)" -out "$made/$role.pem"
done

rm "$made/extensions" "$made/request" "$made/log"
mv "$made" "$folder"
trap - EXIT
echo "$folder: certificates of scheduler, worker and client for $days days, and ca.key, which signs more: keep it apart."
