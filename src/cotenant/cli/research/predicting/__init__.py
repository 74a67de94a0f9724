"""What `cotenant predict` is made of: measurements in, fits, drawings and words out."""
