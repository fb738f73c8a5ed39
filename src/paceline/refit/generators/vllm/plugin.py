"""Tells vLLM that there is a weight-transfer backend called ``paceline``."""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

NAME = "paceline"


def register_backend(module: str, attribute: str) -> None:
    """Enter the backend into vLLM's list, to be imported when it is chosen.

    vLLM calls plugins in every process, and more than once in some.
    """
    try:
        WeightTransferEngineFactory.register_engine(NAME, module, attribute)
    except ValueError as exc:
        if "already registered" not in str(exc):
            raise
