"""Parts of `cotenant predict`: reading measurements, fitting them, and showing fits as text, tables and charts."""
