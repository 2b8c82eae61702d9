"""The paper's claims, measured and judged. `python -m scripts.claims` runs all of them."""
