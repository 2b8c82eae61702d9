"""Translate German into English with a trained run.

    python scripts/translate.py RUN "Ein Mann fährt Fahrrad."
    python scripts/translate.py RUN < sentences.de

RUN is a run's id, or its checkpoint.pt (outputs/RUN/checkpoint.pt, which a finished run leaves there), made by
`python train.py -cn translate`. A line of standard input is a text; an empty one stays empty.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path

import torch
from omegaconf import OmegaConf

from lra_data.base import DataError
from macformer.harness import checkpoint as checkpoints
from macformer.harness import config as configs
from macformer.harness import device as devices
from macformer.harness.loop import CannotRun, load_weights
from macformer.paper import multi30k
from macformer.paper.translation import search

FAR = 100  # tokens of a source; in the training split none has 80
MOST = 64  # beams


class TrainedTranslator:
    """A trained translator: the weights that were best on dev."""

    def __init__(self, name: str, outputs: str, data: str, device: torch.device):
        file = Path(name) if name.endswith(".pt") else Path(outputs) / name / "checkpoint.pt"
        saved = checkpoints.load(file)
        config = OmegaConf.create(json.loads(saved["config"]))
        if config.task.name != "multi30k":
            raise checkpoints.CheckpointError(
                f"{file} is a run of {config.task.name}: give one of `python train.py -cn translate`"
            )
        vocabulary = multi30k.find_vocabulary(data, saved["fingerprint"])
        if vocabulary is None:
            raise DataError(
                f"{data}/multi30k has no vocabulary of the data {saved['fingerprint'][:8]} that {name} was trained on: "
                "give paths.data of that training as --data"
            )
        self.vocabulary = vocabulary
        self.model = configs.build(config, "model", vocabulary=self.vocabulary.tokenizer.get_vocab_size())
        load_weights(self.model, saved["best_weights"] or saved["model"])
        self.model.to(device).eval()
        self.device = device

    def __call__(self, text: str, beam: int) -> str:
        """ValueError if it is too long, or no text."""
        if not text.strip():
            return ""
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError("it is not UTF-8")
        (ids,) = self.vocabulary.encode([text.strip()])
        if len(ids) > self.model.longest:
            raise ValueError(f"it has {len(ids):,} tokens, and at most {self.model.longest:,} are taken: cut it up")
        if len(ids) > FAR:
            print(f"warning: {len(ids)} tokens are far more than any text of training had: cut it up", file=sys.stderr)
        (found,) = search(self.model, torch.from_numpy(ids).unsqueeze(0).to(self.device), beam)
        return self.vocabulary.decode(found)


def lines() -> Iterator[str]:
    if sys.stdin.isatty():
        print("German, a sentence a line; Ctrl-D ends", file=sys.stderr)
    return (line.rstrip("\n") for line in sys.stdin)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run's id, or its checkpoint.pt")
    parser.add_argument("text", nargs="*", help="German texts; none: the lines of standard input")
    parser.add_argument("--beam", type=int, default=1, help="beams of the search; default: 1, greedy")
    parser.add_argument("--outputs", default="outputs", help="paths.outputs of the training")
    parser.add_argument("--data", default="data", help="paths.data of the training, where the vocabulary is")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    options = parser.parse_intermixed_args(arguments)
    for stream in (sys.stdin, sys.stdout):  # whatever the locale says
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")
    failed = False
    try:
        if not 1 <= options.beam <= MOST:
            raise ValueError(f"--beam {options.beam} must be 1 to {MOST}")
        translate = TrainedTranslator(options.run, options.outputs, options.data, devices.choose(options.device))
        for number, text in enumerate(options.text or lines(), 1):
            try:
                print(translate(text, options.beam), flush=True)
            except ValueError as error:
                print(f"error: text {number}: {error}", file=sys.stderr)
                print(flush=True)  # its line is there: the others stay beside theirs
                failed = True
    except (checkpoints.CheckpointError, CannotRun, DataError, configs.ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
