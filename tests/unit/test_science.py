"""The science stands alone: torch and numpy, with what they need themselves, are all that it needs."""

import subprocess
import sys

from tests.conftest import ROOT

ALONE = r"""
import importlib, pkgutil, re, sys
from importlib.metadata import distributions, packages_distributions

needs = {
    each.name.lower().replace("_", "-"): [word for word in each.requires or [] if "extra ==" not in word]
    for each in distributions()
}
kept, asked = set(), ["torch", "numpy"]
while asked:
    name = re.match(r"[\w.-]+", asked.pop())[0].lower().replace("_", "-")
    asked += [] if name in kept else needs.get(name, [])
    kept.add(name)
for module, homes in packages_distributions().items():
    if module != "macformer" and not kept & {home.lower().replace("_", "-") for home in homes}:
        sys.modules[module] = None  # importing it is an error
rooms = ("harness", "report", "paper")
sys.modules |= dict.fromkeys((*(f"macformer.{room}" for room in rooms), "lra_data"))
import macformer, torch
for module in pkgutil.iter_modules(macformer.__path__):
    if module.name not in rooms:
        print(importlib.import_module(f"macformer.{module.name}").__name__)
q = torch.randn(2, 2, 64, 16, requires_grad=True)
macformer.PostSBN(2, 16)(macformer.RMFAttention(16, 32)(macformer.PreSBN()(q), q, q)).sum().backward()
assert q.grad.isfinite().all() and sys.modules["hydra"] is sys.modules["pydantic"] is sys.modules["scipy"] is None
"""


def test_the_science_needs_torch_and_numpy_alone() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert {f"macformer.{name}" for name in ("kernels", "linear", "attention", "model")} < set(done.stdout.split())
