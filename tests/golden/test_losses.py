"""No change of the numbers goes unnoticed."""

from pathlib import Path

import pytest
import torch

from tests.conftest import MODELS
from tests.golden.losses import DIRECTED, TRANSLATORS, first_losses, read


@pytest.mark.parametrize("name", [*MODELS, *DIRECTED, *TRANSLATORS])
def test_the_first_losses_are_the_golden_ones(name: str, tmp_path: Path) -> None:
    version, golden = read(name)
    ours = torch.__version__.partition("+")[0]
    if version != ours:
        pytest.skip(f"the golden losses are those of torch {version}, this is {ours}")
    assert first_losses(name, str(tmp_path)) == pytest.approx(golden, rel=1e-4)


def test_the_golden_losses_differ_between_models_but_where_they_are_the_same_function() -> None:
    losses = {name: read(name)[1] for name in MODELS}
    assert losses["macformer_exp"] == losses["macformer_trigh"]
    assert losses["transformer"] == losses["transformer_checkpointed"]  # what is dropped, too
    assert losses["macformer_exp_released"] == losses["macformer_trigh_released"]
    assert len({tuple(values) for values in losses.values()}) == len(MODELS) - 3
    losses |= {name: read(name)[1] for name in (*DIRECTED, *TRANSLATORS)}
    assert len({tuple(values) for values in losses.values()}) == len(losses) - 3
    assert all(len(values) == 20 for values in losses.values())
