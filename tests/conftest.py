"""Shared fixtures: composed configs, tiny sources for each task, the real data where it is there."""

import io
import os
import random
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, open_dict

from macformer.harness import device as devices
from macformer.harness.config import explain

ROOT = Path(__file__).parent.parent
Compose = Callable[..., DictConfig]  # what the fixtures `composed` and `cell` are
MODELS = sorted(file.stem for file in (ROOT / "configs" / "model").glob("*.yaml"))
TASKS = sorted(file.stem for file in (ROOT / "configs" / "task").glob("*.yaml"))
# A cell in seconds: real code, short texts.
TINY = ["trainer=smoke", "task.data.length=64", "task.data.max_length=60", "task.data.examples.train=16"]
TINY_TASK = {"listops": ["task.data.min_length=10"], "text": [], "retrieval": []}


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs from all tests and their processes, so that device=auto is the CPU everywhere, but for -m gpu."""
    if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("tests see a CUDA GPU by `pytest -m gpu`, on a machine that has one")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def composed() -> Iterator[Compose]:
    """composed("model=rfa", ...) -> the configuration that train.py would get."""

    def make(*overrides: str) -> DictConfig:
        try:
            config = compose("train", list(overrides), return_hydra_config=True)
        except MissingConfigException as error:
            if error.missing_cfg_file == "hydra/launcher/ray":  # the others are installed by `make setup`
                pytest.skip(explain(error))
            raise
        HydraConfig.instance().set_config(config.copy())  # where ${hydra:...} is looked up
        with open_dict(config):
            del config["hydra"]
        return config

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        yield make
    HydraConfig.instance().cfg = None


@pytest.fixture
def cell(composed: Compose, sources: Path, tmp_path: Path) -> Compose:
    """cell("text", "rfa", ...) -> a tiny run of that task and model, its records under tmp_path."""

    def make(task: str, model: str, *overrides: str) -> DictConfig:
        paths = [f"paths.data={sources}", f"paths.results={tmp_path}", f"paths.outputs={tmp_path}/outputs"]
        return composed(f"task={task}", f"model={model}", *TINY, *TINY_TASK[task], *paths, *overrides)

    return make


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """torch.cuda as far as device.py calls it; its memory is what a test says."""
    cuda = MagicMock(spec=torch.cuda, allocated=0, reserved=0)
    cuda.is_available.return_value = True
    cuda.device_count.return_value = 3
    cuda.get_device_name.return_value = "Fake GPU"
    cuda.get_device_properties.side_effect = lambda gpu: SimpleNamespace(uuid=f"uuid-of-{gpu}")
    cuda.max_memory_allocated.side_effect = lambda device: cuda.allocated
    cuda.max_memory_reserved.side_effect = lambda device: cuda.reserved
    cuda.reset_peak_memory_stats.side_effect = lambda device: cuda.configure_mock(allocated=0, reserved=0)
    cuda.get_rng_state.return_value = torch.tensor([7], dtype=torch.uint8)
    monkeypatch.setattr(devices, "cuda", cuda)
    return cuda


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a small IMDb archive and small Retrieval files, made here."""
    folder = tmp_path_factory.mktemp("data")
    write_archive(folder / "aclImdb_v1.tar.gz", reviews=20)
    write_pairs(folder, lines=20)
    return folder


def committed(folder: str) -> list[Path]:
    """The records below it, without those that you have not committed."""
    listed = subprocess.run(["git", "ls-files", f"{folder}/*.json"], capture_output=True, text=True, cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout: cannot tell the committed records from yours")
    return [ROOT / name for name in listed.stdout.split()]


def write_archive(file: Path, reviews: int) -> None:
    """`reviews` negative and as many positive ones in train and in test."""
    letters = random.Random(0)
    with tarfile.open(file, "w:gz") as archive:
        for part in ("train", "test"):
            for sentiment, rating, word in (("neg", 2, "dull"), ("pos", 9, "fine")):
                for number in range(reviews):
                    text = f"{part} {number}: a {word} film " + "".join(letters.choices("abc é", k=number * 3))
                    content = text.encode()
                    member = tarfile.TarInfo(f"aclImdb/{part}/{sentiment}/{number}_{rating}.txt")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def write_pairs(folder: Path, lines: int) -> None:
    letters = random.Random(0)
    for part in ("train", "eval", "test"):
        with open(folder / f"new_aan_pairs.{part}.tsv", "w", encoding="utf-8") as file:
            for number in range(lines):
                one, two = ("".join(letters.choices('abc "é', k=5 + 4 * number)) for _ in range(2))
                file.write(f"{number % 2}.0\tA{number}\tB{number}\t{one}x\t{two}x\n")


@pytest.fixture(scope="session")
def multi30k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a small Multi30K, made here."""
    folder = tmp_path_factory.mktemp("multi30k")
    pairs = captions()
    write_multi30k(folder, {"train": pairs[:300], "dev": pairs[300:324], "test": pairs[324:340]})
    return folder


def captions() -> list[tuple[str, str]]:
    """German sentences of a small grammar with their translations, 756 different ones, always in the same order."""
    subjects = [("Ein {}er Hund", "dog"), ("Ein {}er Mann", "man"), ("Eine {}e Frau", "woman")]
    subjects += [("Eine {}e Katze", "cat"), ("Ein {}es Kind", "child"), ("Ein {}es Mädchen", "girl")]
    qualities = [("klein", "small"), ("jung", "young"), ("schön", "pretty")]
    verbs = [("läuft", "runs"), ("schläft", "sleeps"), ("sitzt", "sits"), ("steht", "stands"), ("wartet", "waits")]
    verbs += [("fällt", "falls"), ("spielt", "plays")]
    places = [("", ""), (" im Schnee", " in the snow"), (" auf der Straße", " on the street")]
    places += [(" vor einem großen Haus", " in front of a large house"), (" am Fluss", " at the river")]
    places += [(" unter der alten Brücke", " under the old bridge")]
    pairs = [
        (f"{subject.format(german)} {verb}{place}.", f"A {english} {noun} {does}{where}.")
        for subject, noun in subjects
        for german, english in qualities
        for verb, does in verbs
        for place, where in places
    ]
    return random.Random(0).sample(pairs, len(pairs))


def write_multi30k(folder: Path, pairs: dict[str, list[tuple[str, str]]]) -> None:
    """The six files of Multi30K; of each split, pairs of a German and an English line."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, name in (("train", "train"), ("dev", "val"), ("test", "test_2016_flickr")):
        for side, language in enumerate(("de", "en")):
            lines = "".join(f"{pair[side]}\n" for pair in pairs[split])
            (folder / f"{name}.{language}").write_bytes(lines.encode())


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data, or a skip."""
    folder = Path(os.environ.get("MACFORMER_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is not there (set MACFORMER_SHARED_DATA)")
    return folder
