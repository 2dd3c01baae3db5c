import pytest

from lensemble.errors import ContractViolation
from lensemble.ids import Digest, FederationId
from lensemble.seeds import sketch
from lensemble.wire import messages
from lensemble.workload import FieldTerms, NoopTask, Privacy, Workload, layout
from lensemble_node.terms import agree, objection

FEDERATION = FederationId("5" * 32)


def welcome(aggregation: str, **privacy: object) -> messages.Welcome:
    workload = Workload(
        task=NoopTask(parameters=10),
        field=FieldTerms(k=16),
        privacy=Privacy.model_validate({"enabled": True} | privacy),
    )
    return messages.Welcome(
        federation=FEDERATION,
        epoch=1,
        build="b",
        coordinator="hub",
        workload=workload.canonical(),
        config_hash=workload.digest,
        layout_digest=layout(workload).digest,
        aggregation=aggregation,
        last=messages.LastRecord(round=-1, digest=Digest("0" * 64), contributors=()),
    )


def test_a_part_of_the_noise_is_never_sent_in_the_clear() -> None:
    spread = {"placement": "distributed", "cohort": 5}
    with pytest.raises(ContractViolation, match="carry only a part of the noise"):
        agree(welcome("plain", **spread), plain=True)
    assert agree(welcome("masked", **spread), plain=False).cohort == 5
    assert agree(welcome("plain"), plain=True).cohort == 0
    off = agree(welcome("plain", enabled=False, **spread), plain=True)
    assert off.cohort == 0


@pytest.mark.parametrize(
    ("enabled", "unit", "reason"),
    [(False, "participant", ""), (True, "episode", ""), (True, "participant", "carry noise")],
)
def test_narrow_words_are_refused_where_updates_carry_noise(
    enabled: bool, unit: str, reason: str
) -> None:
    """A coordinator cannot ask for what a residual would make of the noise of participants."""
    workload = Workload(
        field=FieldTerms(k=16), privacy=Privacy(enabled=enabled, unit=unit, clip_norm=1.0)
    )
    greeting = messages.Welcome(
        federation=FEDERATION,
        epoch=1,
        build="b",
        coordinator="hub",
        workload=workload.canonical(),
        config_hash=workload.digest,
        layout_digest=layout(workload).digest,
        aggregation="masked",
        last=messages.LastRecord(round=-1, digest=Digest("0" * 64), contributors=()),
    )
    terms = agree(greeting, plain=False)
    for plan in (b"", bytes([70]) * len(layout(workload).tensors)):
        asked = messages.RoundOpen(
            federation=FEDERATION,
            epoch=1,
            round=3,
            attempt=0,
            prior_digest=Digest("0" * 64),
            layout_digest=terms.layout_digest,
            config_hash=terms.config_hash,
            roster_digest=Digest("0" * 64),
            sketch_seed=sketch(workload.root_seed, 3),
            inner_steps=workload.inner.steps,
            global_step=0,
            state_bytes=terms.state_bytes,
            field=messages.FieldParams(k=16, n_max=64, plan=plan),
            answer_within_s=1.0,
        )
        found = objection(terms, asked)
        assert (found is not None) == bool(reason and plan)
        assert found is None or reason in found.message
