"""Files from the Hugging Face hub, or from its cache on this machine; no long wait where there is no hub."""

import http.client
import threading
import urllib.error
import urllib.request
from pathlib import Path

from lra_data.base import DataError

PATIENCE = 2.0  # seconds for a server to answer


def download(name: str, patterns: list[str], key: str, instead: str) -> Path:
    """The folder with those files of the data set, from the cache if the hub cannot be reached.

    `key` is what asked for it, `instead` what else can be done: both for the message.
    """
    import huggingface_hub
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE or not answers(constants.ENDPOINT)
    try:
        there = huggingface_hub.snapshot_download(
            name, repo_type="dataset", allow_patterns=patterns, local_files_only=offline
        )
    except Exception as error:  # of the network or of the hub: there are many
        reason = f"{constants.ENDPOINT} cannot be reached" if offline else repr(error)
        raise DataError(
            f"{key}: {name} cannot be had ({reason}) and is not in the cache of this machine; {instead}"
        ) from None
    return Path(there)


def answers(url: str) -> bool:
    """Whether a server answers in time, whatever it says. In a thread, as looking up a name has no timeout."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PATIENCE).close()
        except urllib.error.HTTPError:
            pass
        except (OSError, ValueError, http.client.HTTPException):  # no server, no address, no answer
            return
        answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return answered.is_set()
