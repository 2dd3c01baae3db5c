"""GGUF headers: what another writer writes is read, and anything else ends in a named refusal."""

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf as peer
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lensemble import gguf, model_header
from lensemble.errors import LensembleError, ModelFileError, UnsupportedModel
from lensemble.model_facts import layer_of, tensors_for
from tests.tiny_gguf import write_tiny


def parse(whole: bytes, file_bytes: int | None = None) -> gguf.Header:
    return gguf.parse(
        lambda offset, length: whole[offset : offset + length],
        len(whole) if file_bytes is None else file_bytes,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.mark.parametrize("quant", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_every_tensor_lies_where_another_reader_finds_it(
    tmp_path: Path, quant: str, alignment: int
) -> None:
    path = write_tiny(tmp_path / "m.gguf", quant=quant, alignment=alignment, tied=False)
    theirs = peer.GGUFReader(path)
    ours = gguf.parse_file(path)
    assert ours.alignment == alignment
    assert [
        (each.name, each.ggml_type, each.shape, each.offset, each.nbytes) for each in ours.tensors
    ] == [
        (each.name, each.tensor_type, tuple(each.shape), each.data_offset, each.n_bytes)
        for each in sorted(theirs.tensors, key=lambda each: each.data_offset)
    ]
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            found = ours.metadata[key]
            wanted = field.contents()
            assert (list(found) if isinstance(found, tuple) else found) == wanted, key


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    writer = peer.GGUFWriter(tmp_path / "m.gguf", "x")
    values: dict[str, tuple[Any, Any]] = {
        "u8": (writer.add_uint8, 200), "i8": (writer.add_int8, -3),
        "u16": (writer.add_uint16, 65_000), "i16": (writer.add_int16, -300),
        "u32": (writer.add_uint32, 1 << 31), "i32": (writer.add_int32, -70_000),
        "u64": (writer.add_uint64, 1 << 63), "i64": (writer.add_int64, -(1 << 62)),
        "f32": (writer.add_float32, 0.5), "f64": (writer.add_float64, 0.1),
        "yes": (writer.add_bool, True), "text": (writer.add_string, "näh\x00"),
        "texts": (writer.add_array, ["a", "", "ß"]), "numbers": (writer.add_array, [1, 2]),
        "nested": (writer.add_array, [[1, 2], [3]]), "flags": (writer.add_array, [True, False]),
    }  # fmt: skip
    for key, (add, value) in values.items():
        add(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = gguf.parse_file(tmp_path / "m.gguf").metadata
    assert {key: found[key] for key in values} == {
        key: _tuples(value) for key, (_, value) in values.items()
    }


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def test_the_first_bytes_are_enough(tiny: Path) -> None:
    whole = tiny.read_bytes()
    header = parse(whole)
    assert parse(whole[: header.data_offset], len(whole)) == header
    asked: list[tuple[int, int]] = []

    def read(offset: int, length: int) -> bytes:
        asked.append((offset, length))
        return whole[offset : offset + length]

    assert gguf.parse(read, len(whole)) == header
    assert [offset for offset, _ in asked] == sorted(offset for offset, _ in asked)


def test_cut_anywhere_the_header_is_refused(tiny: Path) -> None:
    whole = tiny.read_bytes()
    end = parse(whole).data_offset
    for cut in [*range(64), *range(64, end, 61), end]:
        with pytest.raises(ModelFileError):
            parse(whole[:cut])
        if cut < end - 64:
            with pytest.raises(ModelFileError, match="came"):
                parse(whole[:cut], len(whole))


class Writer:
    """Writes headers that no library would."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.tensors: list[bytes] = []

    def text(self, value: str | bytes) -> bytes:
        raw = value.encode() if isinstance(value, str) else value
        return struct.pack("<Q", len(raw)) + raw

    def key(self, name: str, kind: int, raw: bytes) -> "Writer":
        self.keys.append(self.text(name) + struct.pack("<I", kind) + raw)
        return self

    def tensor(
        self, name: str = "t", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0
    ) -> "Writer":
        self.tensors.append(
            self.text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        )
        return self

    def bytes(
        self, *, version: int = 3, counts: tuple[int, int] | None = None, data: int = 4096
    ) -> bytes:
        tensors, keys = counts or (len(self.tensors), len(self.keys))
        head = b"GGUF" + struct.pack("<IQQ", version, tensors, keys)
        return head + b"".join(self.keys) + b"".join(self.tensors) + bytes(data)


REFUSED: list[tuple[str, bytes, str]] = [
    ("magic", b"PK\x03\x04" + bytes(100), "begins with"),
    ("overlap", Writer().tensor("a").tensor("b", offset=0).bytes(), "b overlaps a"),
    ("partial", Writer().tensor("a", (9,)).tensor("b", offset=32).bytes(), "b overlaps a"),
    ("outside", Writer().tensor("a", (4096,)).bytes(), "the file at"),
    ("far", Writer().tensor("a", offset=1 << 62).bytes(), "the file at"),
    ("huge", Writer().tensor("a", ((1 << 40), (1 << 40))).bytes(), "the file at"),
    ("twice", Writer().tensor("a").tensor("a", offset=32).bytes(), "twice"),
    ("unaligned", Writer().tensor("a", offset=8).bytes(), "multiple of 32"),
    ("empty", Writer().tensor("a", (0,)).bytes(), "shape"),
    ("rank 0", Writer().tensor("a", ()).bytes(), "dimensions"),
    ("rank 5", Writer().tensor("a", (1,) * 5).bytes(), "dimensions"),
    ("blocks", Writer().tensor("a", (33,), kind=8).bytes(), "blocks"),
    ("name", Writer().tensor("a" * 65).bytes(), "65 bytes"),
    ("no UTF-8", Writer().tensor("t").bytes().replace(b"t", b"\xff", 1), "UTF-8"),
    ("key twice", Writer().key("k", 0, b"1").key("k", 0, b"1").bytes(), "twice"),
    ("key length", Writer().key("k" * 300, 0, b"1").bytes(), "300 bytes"),
    ("value type", Writer().key("k", 13, bytes(8)).bytes(), "unknown type 13"),
    ("bool", Writer().key("k", 7, b"\x02").bytes(), "neither"),
    ("many keys", Writer().bytes(counts=(0, 1 << 60)), "are the most"),
    ("many tensors", Writer().bytes(counts=(1 << 60, 0)), "are the most"),
    ("more keys than bytes", Writer().bytes(counts=(0, 4000), data=100), "do not fit"),
    ("string", Writer().key("k", 8, struct.pack("<Q", 1 << 60)).bytes(), "are the most"),
    ("array", Writer().key("k", 9, struct.pack("<IQ", 0, 1 << 60)).bytes(), "are the most"),
    ("texts", Writer().key("k", 9, struct.pack("<IQ", 8, 1 << 20)).bytes(), "more than fit"),
    ("nesting", Writer().key("k", 9, struct.pack("<IQ", 9, 1) * 9).bytes(), "nests"),
    ("alignment", Writer().key("general.alignment", 4, struct.pack("<I", 48)).bytes(), "power"),
    ("alignment 0", Writer().key("general.alignment", 4, bytes(4)).bytes(), "power"),
    ("alignment text", Writer().key("general.alignment", 8, bytes(8)).bytes(), "not a number"),
]  # fmt: skip


@pytest.mark.parametrize(("whole", "said"), [each[1:] for each in REFUSED],
                         ids=[each[0] for each in REFUSED])  # fmt: skip
def test_what_contradicts_itself_is_refused_by_name(whole: bytes, said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        parse(whole)


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        (Writer().bytes(version=1), "version 1"),
        (Writer().bytes(version=3 << 24), "big-endian version 3"),
        (Writer().tensor("a", kind=4).bytes(), "a is of ggml type 4"),
    ],
)
def test_what_nobody_reads_is_unsupported(whole: bytes, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        parse(whole)


@given(st.binary(max_size=400))
@example(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
def test_any_bytes_end_in_a_header_or_a_refusal(rest: bytes) -> None:
    for whole in (rest, b"GGUF" + struct.pack("<I", 3) + rest):
        with suppress(ModelFileError, UnsupportedModel):
            parse(whole)


@given(st.data())
def test_a_damaged_header_ends_in_a_header_or_a_refusal(tiny: Path, data: st.DataObject) -> None:
    whole = bytearray(tiny.read_bytes())
    end = parse(bytes(whole)).data_offset
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 1))
        whole[at] = data.draw(st.integers(0, 255))
    try:
        header = parse(bytes(whole))
        facts = model_header.facts_of(header)
    except (ModelFileError, UnsupportedModel):
        return
    assert all(each.offset + each.nbytes <= len(whole) for each in header.tensors)
    assert facts.layers <= model_header.MAX_LAYERS


# ---- facts ----


def facts(path: Path) -> Any:
    return model_header.facts_of(gguf.parse_file(path))


def test_a_model_is_known_from_its_header(tiny: Path) -> None:
    found = facts(tiny)
    assert (found.layers, found.hidden, found.heads, found.kv_heads) == (4, 64, 4, 2)
    assert (found.head_dim, found.vocabulary, found.tied, found.eos) == (16, 288, True, (0, 2))
    assert found.file_bytes == tiny.stat().st_size


@pytest.mark.parametrize("tied", [True, False])
def test_stages_need_all_tensors_and_share_only_a_tied_head(tmp_path: Path, tied: bool) -> None:
    header = gguf.parse_file(write_tiny(tmp_path / "m.gguf", tied=tied))
    found, parts = model_header.facts_of(header), model_header.parts_of(header)
    for cut in range(1, 4):
        first, last = tensors_for(found, parts, 0, cut), tensors_for(found, parts, cut, 4)
        assert {each.name for each in (*first, *last)} == {each.name for each in parts}
        shared = {each.name for each in first} & {each.name for each in last}
        assert shared == ({"token_embd.weight"} if tied else set())
    assert tensors_for(found, parts, 0, 4) == parts
    assert {layer_of(each.name) for each in tensors_for(found, parts, 1, 2)} == {1}


def test_factors_of_the_rotary_embedding_are_everybodys(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", extra={"rope_freqs.weight": np.ones(8)})
    header = gguf.parse_file(path)
    found, parts = model_header.facts_of(header), model_header.parts_of(header)
    for first in range(4):
        names = {each.name for each in tensors_for(found, parts, first, first + 1)}
        assert "rope_freqs.weight" in names


def test_the_tokenizer_is_known_by_its_content(tmp_path: Path) -> None:
    one = facts(write_tiny(tmp_path / "1", seed=1))
    two = facts(write_tiny(tmp_path / "2", seed=2, layers=2))
    assert one.tokenizer_digest == two.tokenizer_digest
    raw = (tmp_path / "1").read_bytes()
    at = raw.index(b"<|im_end|>")
    (tmp_path / "3").write_bytes(raw[:at] + b"<|im_End|>" + raw[at + 10 :])
    assert facts(tmp_path / "3").tokenizer_digest != one.tokenizer_digest


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"expert_count": 8}, "expert_count is 8"),
        ({"attention.sliding_window": 128}, "sliding_window"),
        ({"attention.value_length": 8}, "values"),
        ({"attention.key_length": 32}, "attn_q.weight has the shape"),
        ({"rope.scaling.factor": 4}, "factor is 4"),
        ({"rope.dimension_count": 18}, "rope turns 18"),
        ({"block_count": 5}, "blk.4.* is missing"),
        ({"block_count": 0}, "block_count is 0"),
        ({"block_count": 1 << 30}, "block_count"),
        ({"block_count": 3}, "blk.3.* is not computed"),
        ({"attention.head_count": 3}, "no multiple"),
        ({"feed_forward_length": 64}, "ffn_gate"),
    ],
)
def test_odd_metadata_is_refused_by_name(tmp_path: Path, keys: dict[str, int], said: str) -> None:
    with pytest.raises((ModelFileError, UnsupportedModel), match=said):
        facts(write_tiny(tmp_path / "m.gguf", keys=keys))


@pytest.mark.parametrize("key", [
    "llama.block_count", "llama.embedding_length", "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon", "llama.context_length", "tokenizer.ggml.tokens",
    "llama.feed_forward_length", "general.architecture",
])  # fmt: skip
def test_a_missing_key_is_named(tiny: Path, tmp_path: Path, key: str) -> None:
    raw = tiny.read_bytes()
    assert raw.count(key.encode()) >= 1
    other = key[:-1] + "#"
    (tmp_path / "m").write_bytes(raw.replace(key.encode(), other.encode(), 1))
    with pytest.raises(LensembleError, match=key):
        facts(tmp_path / "m")


def test_other_architectures_quantisations_tensors_and_parts_are_refused(tmp_path: Path) -> None:
    raw = write_tiny(tmp_path / "m").read_bytes()
    at = raw.index(b"llama")
    (tmp_path / "a").write_bytes(raw[:at] + b"gemma" + raw[at + 5 :])
    with pytest.raises(UnsupportedModel, match="gemma; computed are llama"):
        facts(tmp_path / "a")
    with pytest.raises(UnsupportedModel, match=r"attn_q\.bias"):
        facts(write_tiny(tmp_path / "b", extra={"blk.0.attn_q.bias": np.ones(64)}))
    whole = Writer().key("general.architecture", 8, Writer().text("llama"))
    whole.key("split.count", 2, struct.pack("<H", 3))
    with pytest.raises(UnsupportedModel, match="one of 3 parts") as raised:
        model_header.facts_of(parse(whole.bytes()))
    assert "llama-gguf-split" in raised.value.remediation


@pytest.mark.parametrize("number", sorted(set(gguf.TYPES) - model_header.COMPUTED_TYPES))
def test_a_quantisation_that_is_not_computed_is_named(tiny: Path, number: int) -> None:
    header = gguf.parse_file(tiny)
    first, *rest = header.tensors
    other = type(first)(first.name, number, first.shape, first.offset, first.nbytes)
    changed = gguf.Header(*(
        (other, *rest) if name == "tensors" else getattr(header, name)
        for name in header.__struct_fields__
    ))  # fmt: skip
    with pytest.raises(UnsupportedModel, match=gguf.TYPES[number].name):
        model_header.facts_of(changed)


def test_sizes_of_types_are_those_of_the_reference() -> None:
    for number, kind in gguf.TYPES.items():
        theirs = peer.GGMLQuantizationType(number)
        assert (kind.name, (kind.elements, kind.nbytes)) == (
            theirs.name,
            peer.GGML_QUANT_SIZES[theirs],
        )
    assert set(gguf.TYPES) == {int(each) for each in peer.GGMLQuantizationType}
