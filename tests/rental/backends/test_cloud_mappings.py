"""Whatever a provider answers, its mapping reads it: values nobody has seen are unknown."""

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rental.backends.lambda_ import mapping as lambda_
from paceline.rental.backends.nebius import mapping as nebius
from paceline.rental.backends.runpod import mapping as runpod
from paceline.rental.backends.vast import mapping as vast
from paceline.rental.errors import (
    AbsentError,
    AuthError,
    BalanceError,
    CapacityError,
    NoOffersError,
    ProvisionError,
    RateLimitError,
    RequestError,
    ServerError,
)
from paceline.rental.model import InstanceHandle, InstanceState, InstanceStatus, OfferConstraints

_NOW_S = 1_800_000_000.0
_H = InstanceHandle("x", "1", "paceline-a", 0.0)
_STATES = {state.value for state in InstanceState}

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
_FIELDS = (
    *("id", "status", "actual_status", "cur_state", "status_msg", "ports", "public_ipaddr"),
    *("ssh_host", "ssh_port", "start_date", "num_gpus", "gpu_name", "gpu_ram", "dph_base", "ip"),
    *("ssh", "runtime", "createdAt", "gpu", "instance_type", "tags", "name", "metadata", "spec"),
    *("price", "memory", "availability", "maxCount", "storage_cost", "disk_space", "label"),
)
_rows = st.dictionaries(st.sampled_from(_FIELDS), _json, max_size=12)

_STATUS_READERS: dict[str, Callable[[Mapping[str, object]], InstanceStatus]] = {
    "vast": lambda row: vast.status_of(row, now_s=_NOW_S),
    "runpod": lambda row: runpod.status_of(row, _H, now_s=_NOW_S),
    "lambda": lambda row: lambda_.status_of(row, _H, now_s=_NOW_S),
    "nebius": lambda row: nebius.status_of(row, now_s=_NOW_S),
}
_MODULES = {"vast": vast, "runpod": runpod, "lambda": lambda_, "nebius": nebius}


@pytest.mark.parametrize("name", sorted(_MODULES))
@given(row=_rows)
def test_any_row_has_a_status(name: str, row: dict[str, object]) -> None:
    """A row of anything is one of the five states, and running only with an address."""
    status = _STATUS_READERS[name](row)
    assert status.state in _STATES
    assert (status.state == InstanceState.RUNNING) == (status.public_endpoint is not None)
    module = _MODULES[name]
    assert isinstance(module.failure_of(status), str | None)
    handle = module.handle_of(row, now_s=_NOW_S)
    assert handle is None or module.is_instance_id(handle.instance_id)


@pytest.mark.parametrize("name", sorted(_MODULES))
@given(text=st.text(max_size=40))
def test_no_text_becomes_a_path_or_an_offer(name: str, text: str) -> None:
    """Ids from outside are checked before they are part of an address."""
    module = _MODULES[name]
    if module.is_instance_id(text):
        assert not set(text) & set("/?#.% ")


@given(rows=st.lists(_rows, max_size=4), price=st.none() | st.floats(0, 10))
def test_any_search_is_offers_or_none(rows: list[dict[str, object]], price: float | None) -> None:
    """Rows that make no sense are left out; what is left is sorted and within the price."""
    c = OfferConstraints("rtx4090-1x", min_disk_gb=1, max_dph=price)
    types = {"gpu_1x_a10": rows[0]} if rows else {}
    searches: list[Callable[[], list[object]]] = [
        lambda: list(vast.offers_of(rows, c)),
        lambda: list(runpod.offers_of({"SECURE": rows}, c)),
        lambda: list(lambda_.offers_of(types, OfferConstraints("a10-1x", min_disk_gb=1))),
    ]
    for search in searches:
        try:
            assert search()
        except NoOffersError:
            continue


@given(
    status=st.integers(100, 599),
    document=_json | st.dictionaries(st.sampled_from(["error", "msg", "detail"]), _json),
    text=st.text(max_size=40),
)
def test_any_answer_is_judged(status: int, document: object, text: str) -> None:
    """Every status with every body is a success or one thing to do next."""
    for module in (vast, runpod, lambda_):
        refusal = module.judge(status, document, text)
        assert refusal is None or refusal.kind.advice
        assert refusal is not None or 200 <= status < 300
    assert nebius.judge(text, text, document).kind.advice


@pytest.mark.parametrize(
    ("status", "document", "kind"),
    [
        (404, {"error": "auth_error", "msg": "Invalid user key"}, AuthError),
        (404, {"msg": "Session expired. Please log in again."}, AuthError),
        (401, {"msg": "Invalid user key"}, AuthError),
        (404, {"error": "no_such_instance", "msg": "gone"}, AbsentError),
        (404, {"error": "invalid_args", "msg": "error 404/3603: no_such_ask ..."}, CapacityError),
        (410, {"error": "no_such_ask", "msg": "no longer available"}, CapacityError),
        (403, {"error": "invalid_args", "msg": "Offer is not your own"}, CapacityError),
        (400, {"error": "missing_billing"}, BalanceError),
        (400, {"error": "invalid_args", "msg": "image"}, RequestError),
        (404, None, ServerError),
        (429, {"detail": "API requests too frequent"}, RateLimitError),
        (200, {"success": False, "error": "x"}, RequestError),
        (410, {"error": "deprecated_endpoint", "msg": "use v1"}, RequestError),
    ],
)
def test_what_vast_means(status: int, document: object, kind: type[Exception]) -> None:
    """A 404 may be a bad key, an offer that is gone, a machine that is gone, or a proxy."""
    refusal = vast.judge(status, document, "")
    assert refusal is not None
    assert refusal.kind is kind


@pytest.mark.parametrize(
    ("status", "detail", "kind", "is_about_offer"),
    [
        (400, "There are no longer any instances available with", CapacityError, True),
        (400, "This machine does not have the resources to", CapacityError, True),
        (400, "image is invalid", RequestError, True),
        (402, "insufficient balance", BalanceError, False),
        (403, "access denied", AuthError, True),
        (409, "pod is locked", RequestError, False),
        (422, "validation failed", RequestError, False),
    ],
)
def test_what_runpod_means(
    status: int, detail: str, kind: type[Exception], is_about_offer: bool
) -> None:
    """Lack of capacity shows in prose alone; 422 is wrong for every candidate."""
    refusal = runpod.judge(status, {"detail": detail}, "")
    assert refusal is not None
    assert (refusal.kind, refusal.is_about_offer) == (kind, is_about_offer)


def test_runpods_older_api_refuses_with_success() -> None:
    """GraphQL says no with status 200."""
    refusal = runpod.judge(200, {"errors": [{"message": "Unauthorized"}]}, "")
    assert refusal is not None
    assert refusal.kind is AuthError


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "instance-operations/launch/insufficient-capacity", CapacityError),
        (400, "global/object-does-not-exist", AbsentError),
        (400, "global/quota-exceeded", BalanceError),
        (400, "global/unknown", ServerError),
        (400, "global/invalid-parameters", RequestError),
        (401, "global/invalid-api-key", AuthError),
        (404, "something/new", AbsentError),
    ],
)
def test_what_lambda_means(status: int, code: str, kind: type[Exception]) -> None:
    """The code decides, not the status."""
    refusal = lambda_.judge(status, {"error": {"code": code, "message": "m"}}, "")
    assert refusal is not None
    assert refusal.kind is kind


def test_lambdas_limit_speaks_for_itself() -> None:
    """The network in front answers in its own words, whatever the status."""
    refusal = lambda_.judge(403, None, "error code: 1015")
    assert refusal is not None
    assert refusal.kind is RateLimitError


@pytest.mark.parametrize(
    ("detail", "kind"),
    [
        ("not_enough_resources", CapacityError),
        ("quota_failure", BalanceError),
        ("too_many_requests", RateLimitError),
    ],
)
def test_three_things_can_be_exhausted_at_nebius(detail: str, kind: type[Exception]) -> None:
    """The detail tells machines, our limit and patience apart."""
    status = {"details": [{"code": "X", detail: {}}]}
    assert nebius.judge("RESOURCE_EXHAUSTED", "exhausted", status).kind is kind


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ({"actual_status": None}, "loading"),
        ({"actual_status": "created"}, "loading"),
        ({"actual_status": "running"}, "loading"),
        ({"actual_status": "offline"}, "unknown"),
        ({"actual_status": "frozen"}, "unknown"),
        ({"actual_status": "exited"}, "stopped"),
        (
            {
                "actual_status": "running",
                "cur_state": "stopped",
                "next_state": "stopped",
                "intended_status": "stopped",
            },
            "stopped",
        ),
    ],
)
def test_states_of_vast(row: dict[str, object], state: str) -> None:
    """Running without an address is still loading; outbid is stopped."""
    assert vast.status_of(row, now_s=_NOW_S).state == state


def test_vasts_proxy_is_one_port_up_for_jupyter() -> None:
    """The direct address comes first, and the proxy's port depends on the run type."""
    proxy = {"ssh_host": "ssh5.vast.ai", "ssh_port": 19001, "image_runtype": "ssh_direct"}
    direct = {"public_ipaddr": "198.51.100.23 ", "ports": {"22/tcp": [{"HostPort": "41022"}]}}
    user = "root"
    assert vast.endpoint_of(proxy, ssh_user=user) == "ssh://root@ssh5.vast.ai:19001"
    jupyter = {**proxy, "image_runtype": "jupyter_direct"}
    assert vast.endpoint_of(jupyter, ssh_user=user) == "ssh://root@ssh5.vast.ai:19002"
    both = {**jupyter, **direct}
    assert vast.endpoint_of(both, ssh_user=user) == "ssh://root@198.51.100.23:41022"


@pytest.mark.parametrize(
    ("message", "is_fatal"),
    [
        ("Error response from daemon: manifest unknown", True),
        ("Downloading; error pulling image will be retried: Retrying in 5s", False),
        ("3f1c: Downloading [==>  ]", False),
    ],
)
def test_only_what_does_not_pass_is_a_failed_boot(message: str, is_fatal: bool) -> None:
    """Progress that mentions an error is still progress."""
    row = {"actual_status": "loading", "status_msg": message}
    assert (vast.failure_of(vast.status_of(row, now_s=_NOW_S)) is not None) is is_fatal


def test_a_newborn_pod_is_not_gone() -> None:
    """RunPod may not know a pod for some seconds; old ones that it does not know are gone."""
    young = InstanceHandle("runpod", "k3x9q1v7ab", "a", _NOW_S - 5)
    assert runpod.status_of(None, young, now_s=_NOW_S).state == "loading"
    assert runpod.status_of(None, young, now_s=_NOW_S, was_ended=True).state == "destroyed"
    old = InstanceHandle("runpod", "k3x9q1v7ab", "a", _NOW_S - 60)
    assert runpod.status_of(None, old, now_s=_NOW_S).state == "destroyed"


@given(st.text("abcdefgh-0123456789", min_size=1, max_size=128))
def test_labels_survive_the_limits_of_names(label: str) -> None:
    """However long a label is, it is read back whole, and different ones have different names."""
    body = lambda_.launch_body(
        "us-west-1/gpu_1x_a10", image="", key_name="k", label=label, now_s=_NOW_S
    )
    assert len(str(body["name"])) <= 64
    assert lambda_.label_of(body) == label
    assert len(nebius.name_of(label)) <= 63
    assert nebius.name_of(label) != nebius.name_of(label + "x")


@given(st.text("ab", min_size=0, max_size=400))
def test_labels_that_a_provider_cannot_keep_are_refused(label: str) -> None:
    """Too long or empty is a ProvisionError before anything is sent."""

    def make_vast() -> object:
        return vast.create_body(disk_gb=10, image="i", public_key="k", label=label, max_dph=None)

    def make_lambda() -> object:
        offer = "us-west-1/gpu_1x_a10"
        return lambda_.launch_body(offer, image="", key_name="k", label=label, now_s=0.0)

    for limit, make in ((256, make_vast), (128, make_lambda)):
        if 1 <= len(label) <= limit:
            assert make()
        else:
            with pytest.raises(ProvisionError) as caught:
                make()
            assert caught.value.is_backend_wide


def test_the_start_script_fits_and_holds_the_key_once() -> None:
    """Vast takes 4048 characters, and a key that is quoted twice has been seen to break."""
    key = "ssh-ed25519 " + "A" * 3000 + " it's me; rm -rf /"
    script = vast.onstart_of(key)
    assert len(script) < 4048
    assert "rm -rf" not in script
    assert script.count("ssh-ed25519") == 1


@pytest.mark.parametrize("state", ["STOPPED", "CREATING", "DELETING", "ERROR", 17, None])
def test_states_of_nebius(state: object) -> None:
    """Stopped is a beginning while it is worked on, and an end otherwise."""
    row = {"status": {"state": state, "reconciling": True}}
    begun = nebius.status_of(row, now_s=_NOW_S).state
    expected = {"STOPPED": "loading", "CREATING": "loading"}
    assert begun == (expected.get(state, "unknown") if isinstance(state, str) else "unknown")
    if state == "STOPPED":
        settled = nebius.status_of({"status": {"state": state}}, now_s=_NOW_S)
        assert settled.state == "stopped"
        assert nebius.failure_of(settled)
