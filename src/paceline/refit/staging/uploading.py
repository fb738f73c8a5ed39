"""A shard on its way to storage, while training goes on."""

import threading
from concurrent.futures import Future

from paceline.refit.model import CompletionFence
from paceline.refit.staging.shard import StagedBuffers
from paceline.refit.transports.protocol import ObjectServer


def upload(storage: ObjectServer, buffers: StagedBuffers) -> CompletionFence:
    """Begin to upload, and return what waits for the end of it."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            for item in buffers.objects:
                storage.serve_object(item.object_id, item.parts)
        except BaseException as exc:  # noqa: BLE001 - raised by the fence
            done.set_exception(exc)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="paceline-upload", daemon=True).start()
    return CompletionFence(done.result)
