"""Wait for the dashboard link that the demo prints, and see that it answers at /status."""

import re
import sys
import time
import urllib.request
from pathlib import Path

log, deadline = Path(sys.argv[1]), time.monotonic() + 600
while not (found := re.search(r"^dashboard +(http://127\.0\.0\.1:\d+/status)$", log.read_text(errors="replace"), re.M)):
    if time.monotonic() > deadline:
        sys.exit("The demo printed no dashboard link.")
    time.sleep(0.05)
with urllib.request.urlopen(found[1], timeout=30) as page:
    text = page.read().decode()
if "Dask" not in text:
    sys.exit("The page at /status is not the dashboard.")
print(f"{found[1]} answered {page.status}")
