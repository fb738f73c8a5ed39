"""Messages and values are two forms of one thing."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.errors import InvalidRequestError
from paceline.refit.model import (
    Event,
    InstalledReport,
    Lease,
    ObjectStorageSource,
    ObjectStorageType,
    Replica,
    Shard,
    VersionDescription,
    VersionRequest,
    VersionState,
    WeightPayloadFormat,
    WeightVersion,
    WorkerRegistration,
    WorkerRole,
)
from paceline.refit.wire import convert
from paceline.refit.wire import paceline_refit_v1_pb2 as own
from paceline.refit.wire import refit_pb2 as public
from paceline.refit.wire.fields import parse_fields, render_fields

texts = st.text(max_size=8)
counts = st.integers(0, 2**64 - 1)
times = st.floats(allow_nan=False)
objects = st.builds(ObjectStorageSource, uri=texts, storage_type=st.sampled_from(ObjectStorageType))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
descriptions = st.builds(
    VersionDescription,
    run_id=texts,
    sequence=counts,
    step=counts,
    root_digest=texts,
    parent_root=st.none() | texts,
    payload_bytes=counts,
    full_bytes=counts,
    changed_elements=counts,
    total_elements=counts,
)
slots = st.lists(texts, max_size=3).map(tuple)
versions = st.builds(
    WeightVersion,
    uid=texts,
    model_name=texts,
    idempotency_key=texts,
    payload_format=st.sampled_from(WeightPayloadFormat),
    base_version_id=st.none() | texts,
    expected_source_slots=slots,
    layout_signature=texts,
    state=st.sampled_from(VersionState),
    created_at_unix_ms=counts,
    object_storage=st.none() | objects,
    description=st.none() | descriptions,
)

ROUND_TRIPS: dict[
    str, tuple[st.SearchStrategy[Any], Callable[[Any], Any], Callable[[Any], Any]]
] = {
    "worker": (
        st.builds(
            WorkerRegistration,
            worker_id=texts,
            role=st.sampled_from(WorkerRole),
            model_name=texts,
            expires_at_unix_ms=counts,
        ),
        convert.to_worker,
        convert.parse_worker,
    ),
    "record": (versions, convert.to_record, convert.parse_record),
    "request": (
        st.builds(
            VersionRequest,
            model_name=texts,
            idempotency_key=texts,
            payload_format=st.sampled_from(WeightPayloadFormat),
            base_version_id=st.none() | texts,
            expected_source_slots=slots,
            object_storage=st.none() | objects,
            state=st.sampled_from(VersionState),
            uid=st.none() | texts,
        ),
        convert.to_version_request,
        convert.parse_version_request,
    ),
    "shard": (
        st.builds(
            Shard,
            version_id=texts,
            source_slot_id=texts,
            worker_id=texts,
            tensor_count=counts,
            total_bytes=counts,
            manifest_digest=texts,
            manifest_endpoint=texts,
        ),
        convert.to_shard,
        convert.parse_shard,
    ),
    "lease": (
        st.builds(
            Lease, lease_id=texts, version_id=texts, worker_id=texts, expires_at_unix_ms=counts
        ),
        convert.to_lease,
        convert.parse_lease,
    ),
    "report": (
        st.builds(
            InstalledReport,
            worker_id=texts,
            model_name=texts,
            endpoint=texts,
            version_id=texts,
            sequence=st.integers(-(2**63), 2**63 - 1),
            root_digest=texts,
            state=texts,
            installed_at_unix_ms=counts,
            fetched_bytes=counts,
            refit_ms=times,
            pause_ms=times,
        ),
        convert.to_report,
        convert.parse_report,
    ),
    "replica": (
        st.builds(
            Replica,
            version_id=texts,
            source_slot_id=texts,
            worker_id=texts,
            manifest_endpoint=texts,
            region=texts,
            chunks=st.binary(max_size=20),
            coming=st.binary(max_size=20),
            is_complete=st.booleans(),
            load=st.integers(0, 2**32 - 1),
            rates=st.lists(st.tuples(texts, times), max_size=3).map(tuple),
            updated_at_unix_ms=counts,
        ),
        convert.to_replica,
        convert.parse_replica,
    ),
    "event": (
        st.builds(
            Event,
            worker_id=texts,
            name=texts,
            at_unix_ms=counts,
            fields=st.dictionaries(texts, json_values, max_size=4),
            index=counts,
        ),
        convert.to_event,
        convert.parse_event,
    ),
}


@pytest.mark.parametrize("kind", ROUND_TRIPS)
@given(data=st.data())
def test_out_and_back_is_the_same_value(kind: str, data: st.DataObject) -> None:
    """Every value survives the wire; an unset optional stays None, a blank one stays blank."""
    values, render, parse = ROUND_TRIPS[kind]
    value = data.draw(values)
    message = render(value)
    assert parse(type(message).FromString(message.SerializeToString())) == value


@given(st.binary(max_size=80))
def test_parsing_any_message_gives_a_value_or_a_named_refusal(raw: bytes) -> None:
    """Whatever a peer's message holds, parsing it raises nothing but InvalidRequestError."""
    parsers: list[tuple[type[Message], Callable[[Any], object]]] = [
        (public.WorkerRegistration, convert.parse_worker),
        (public.WeightVersion, convert.parse_version),
        (public.CreateWeightVersionRequest, convert.parse_version_request),
        (own.VersionRecord, convert.parse_record),
        (own.Event, convert.parse_event),
    ]
    for kind, parse in parsers:
        with suppress(InvalidRequestError, DecodeError):
            parse(kind.FromString(raw))


def test_an_enum_number_that_nobody_knows_is_named() -> None:
    """The refusal says which enum, which number, and what there is."""
    message = public.WorkerRegistration(worker_id="w", model_name="m")
    message.role = 9  # type: ignore[assignment]
    with pytest.raises(InvalidRequestError, match=r"WORKER_ROLE 9 is not.*1 TRAINER, 2 GENERATOR"):
        convert.parse_worker(message)


def test_an_unspecified_state_means_staging_in_a_create_only() -> None:
    """A create without state is STAGING; a record without state is refused."""
    assert (
        convert.parse_version_request(public.CreateWeightVersionRequest()).state
        is VersionState.STAGING
    )
    with pytest.raises(InvalidRequestError, match="WEIGHT_VERSION_STATE 0"):
        convert.parse_version(public.WeightVersion())


def test_an_absent_base_is_absent_on_the_wire() -> None:
    """None is no field at all, which public clients insist on; a blank text is a blank field."""
    request = VersionRequest(
        model_name="m", idempotency_key="k", payload_format=WeightPayloadFormat.FULL_TENSOR
    )
    message = convert.to_version_request(request)
    assert not message.HasField("base_version_id")
    assert not message.HasField("uid")
    assert not message.HasField("object_storage")


@pytest.mark.parametrize(
    "text", ["", "[]", "1", '{"a":NaN}', '{"a":1e999}', "{" * 50_000, "[" * 60_000, "x" * 70_000]
)
def test_event_fields_that_are_no_bounded_object_are_refused(text: str) -> None:
    """Neither noise, nesting nor size gets past the parser into a value that JSON cannot hold."""
    with pytest.raises(InvalidRequestError, match="event fields"):
        render_fields(parse_fields(text))
