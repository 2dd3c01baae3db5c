import pytest

from lensemble.errors import ContractViolation
from lensemble.ids import Digest, FederationId
from lensemble.wire import messages
from lensemble.workload import FieldTerms, NoopTask, Privacy, Workload, layout
from lensemble_node.terms import agree

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
