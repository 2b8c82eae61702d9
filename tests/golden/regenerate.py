"""make golden: write the golden losses and tables anew. Only when a change is meant; say why in the commit."""

import tempfile

from tests.conftest import MODELS
from tests.golden.losses import DIRECTED, TRANSLATORS, first_losses, write
from tests.golden.tables import FOLDER, golden_tables

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as data:
        for name in (*MODELS, *DIRECTED, *TRANSLATORS):
            write(name, first_losses(name, data))
            print(name)
    for name, text in golden_tables().items():
        (FOLDER / name).write_text(text)
        print(name)
