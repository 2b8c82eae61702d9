"""The science stands alone: torch and numpy are all that it needs."""

import subprocess
import sys

from tests.conftest import ROOT

ALONE = r"""
import importlib, pkgutil, re, sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

kept = set()
def keep(name):  # a package with what it needs itself
    name = re.match(r"[\w.-]+", name)[0].lower().replace("_", "-")
    if name not in kept:
        kept.add(name)
        try:
            for word in requires(name) or ():
                keep(word)
        except PackageNotFoundError:
            pass
keep("torch"), keep("numpy")
for module, homes in packages_distributions().items():
    if not kept & {home.lower().replace("_", "-") for home in homes} and module != "macformer":
        sys.modules[module] = None  # importing it is an error
ROOMS = ("harness", "report", "paper")
sys.modules |= {f"macformer.{room}": None for room in ROOMS} | {"lra_data": None}

import macformer, torch
names = [module.name for module in pkgutil.iter_modules(macformer.__path__) if module.name not in ROOMS]
for name in names:
    importlib.import_module(f"macformer.{name}")
from macformer import PostSBN, PreSBN, RMFAttention
q = torch.randn(2, 2, 64, 16, requires_grad=True)
PostSBN(2, 16)(RMFAttention(16, 32)(PreSBN()(q), PreSBN()(q), q)).sum().backward()
print(len(names), bool(q.grad.isfinite().all()), sys.modules["hydra"], sys.modules["pydantic"])
"""


def test_the_science_needs_torch_and_numpy_alone() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    count, *rest = done.stdout.split()
    assert int(count) >= 8
    assert rest == ["True", "None", "None"]
