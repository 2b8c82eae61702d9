"""make golden: write the golden losses anew. Only when a change of the numbers is meant; say why in the commit."""

import tempfile

from tests.conftest import MODELS
from tests.golden.losses import first_losses, write

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as data:
        for name in MODELS:
            write(name, first_losses(name, data))
            print(name)
