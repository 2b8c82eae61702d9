"""Files from the Hugging Face hub, or from its cache on this machine."""

from pathlib import Path

from lra_data.base import DataError

PATIENCE = 2.0  # seconds for the hub to answer


def download(name: str, patterns: list[str], key: str, instead: str) -> Path:
    """The folder with those files of the data set, from the cache if the hub cannot be reached.

    `key` is what asked for it, `instead` what else can be done: both for the message.
    """
    import huggingface_hub
    from huggingface_hub import constants

    try:  # snapshot_download alone would wait without end for a server that does not answer
        huggingface_hub.dataset_info(name, timeout=PATIENCE)
        reachable = True
    except Exception:  # of the network or of the hub: there are many
        reachable = False
    try:
        there = huggingface_hub.snapshot_download(
            name, repo_type="dataset", allow_patterns=patterns, local_files_only=not reachable
        )
    except Exception as error:
        reason = repr(error) if reachable else f"{constants.ENDPOINT} cannot be reached"
        raise DataError(
            f"{key}: {name} cannot be had ({reason}) and is not in the cache of this machine; {instead}"
        ) from None
    return Path(there)
