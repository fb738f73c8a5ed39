"""Transports by name."""

from paceline.core.registry import LazyEntry

OBJECT_SERVERS: dict[str, LazyEntry] = {
    "http": LazyEntry("paceline.refit.transports.http.server", "HttpObjectServer"),
    "memory": LazyEntry("paceline.refit.transports.memory", "MemoryObjectServer"),
    "nixl": LazyEntry("paceline.refit.transports.nixl.server", "NixlObjectServer", "nixl"),
    "objectstore": LazyEntry(
        "paceline.refit.transports.objectstore.server", "BucketObjectServer", "objectstore"
    ),
}
"""Name -> class that serves objects."""

OBJECT_READERS: dict[str, LazyEntry] = {
    "http": LazyEntry("paceline.refit.transports.http.reader", "HttpObjectReader"),
    "memory": LazyEntry("paceline.refit.transports.memory", "MemoryObjectReader"),
    "nixl": LazyEntry("paceline.refit.transports.nixl.reader", "NixlObjectReader", "nixl"),
    "objectstore": LazyEntry(
        "paceline.refit.transports.objectstore.reader", "BucketObjectReader", "objectstore"
    ),
}
"""Name -> class that reads them."""
