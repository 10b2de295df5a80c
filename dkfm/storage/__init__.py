"""Read, write and check the stores of dkfm: models, CSR rows, Gram matrices and outputs."""
