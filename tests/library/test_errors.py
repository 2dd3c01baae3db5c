import inspect

import pytest

from lensemble import errors
from lensemble.errors import (
    CommitmentMismatch,
    ContextLengthExceeded,
    InvalidTransition,
    InvariantError,
    LensembleError,
    NonDeterministicAggregation,
    OperatorError,
    PeerError,
    PrivacyBudgetExceeded,
    ResidencyViolation,
    Response,
)
from lensemble_coord.training.outer_round import STOPPING_CODES

CLASSES = [
    each
    for each in vars(errors).values()
    if inspect.isclass(each) and issubclass(each, LensembleError)
]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_has_a_code_a_response_and_a_way_out(kind: type[LensembleError]) -> None:
    assert "code" in vars(kind), "a class without a code of its own cannot be told apart"
    assert kind.code == kind.code.lower()
    assert kind.code.replace("_", "").isalnum()
    assert len(kind.code) <= 64, "codes travel in a Label"
    assert isinstance(kind.response, Response)
    assert kind.default_remediation.endswith(".")


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in CLASSES]
    assert len(set(codes)) == len(codes)


def test_an_error_says_what_and_what_to_do() -> None:
    for kind in CLASSES:
        if kind in {ContextLengthExceeded, InvalidTransition}:
            continue
        plain, told = kind("the disk is full"), kind("the disk is full", "Empty it.")
        assert (plain.message, str(plain)) == ("the disk is full", "the disk is full")
        assert plain.remediation == kind.default_remediation
        assert told.remediation == "Empty it."


def test_an_invalid_transition_names_state_and_event() -> None:
    assert str(InvalidTransition(1, "x")) == "int does not answer str: x"


@pytest.mark.parametrize(
    ("name", "response"),
    [
        ("FaultToleranceExceeded", Response.RETRY),
        ("SecureAggregationError", Response.RETRY),
        ("NonDeterministicAggregation", Response.STOP),
        ("PrivacyBudgetExceeded", Response.STOP),
        ("CommitmentMismatch", Response.STOP),
        ("CheckpointIntegrityError", Response.RETRY),
        ("ResidencyViolation", Response.STOP),
        ("ConfigError", Response.STOP),
        ("ContractViolation", Response.REFUSE),
        ("RoundError", Response.REFUSE),
        ("FrameError", Response.REFUSE),
        ("AdmissionRefused", Response.REFUSE),
        ("ProbeError", Response.REFUSE),
        ("DegenerateProcrustes", Response.REFUSE),
    ],
)
def test_the_failure_table(name: str, response: Response) -> None:
    assert getattr(errors, name).response is response


def test_what_the_round_stops_for_has_the_code_of_its_class() -> None:
    assert {PrivacyBudgetExceeded.code} == STOPPING_CODES


def test_what_must_never_be_swallowed_is_no_peers_fault() -> None:
    assert issubclass(ResidencyViolation, InvariantError)
    assert issubclass(NonDeterministicAggregation, InvariantError)
    for kind in (ResidencyViolation, NonDeterministicAggregation, CommitmentMismatch):
        assert not issubclass(kind, PeerError)


def test_the_roots_are_apart() -> None:
    for kind in CLASSES:
        roots = [
            root for root in (PeerError, InvariantError, OperatorError) if issubclass(kind, root)
        ]
        assert len(roots) <= 1, kind
