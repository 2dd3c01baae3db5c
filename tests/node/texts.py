"""Private texts and the example task, for tests of tasks that are not the world model."""

import json
from pathlib import Path

from lensemble.workload import CustomTask, Inner, Outer, Workload

ENTRY = "lensemble_local.letters:Letters"
ALPHABET = "abcdefghij "
LINES = ("a bad cab had a bed ", "each face had a bag ", "a big jig ahead ")


def workload(**inner: object) -> Workload:
    symbols = len(ALPHABET) + 1
    task = CustomTask(
        entry=ENTRY,
        options={"context": 3, "width": 16, "alphabet": ALPHABET},
        parameters={
            "letters": (symbols, 8),
            "hidden.weight": (16, 24),
            "hidden.bias": (16,),
            "output.weight": (symbols, 16),
        },
    )
    terms = Inner(**({"steps": 6, "batch": 16, "schedule_steps": 60} | inner))
    return Workload(name="letters", task=task, inner=terms, outer=Outer(lr=1.0, momentum=0.0))


def folder(place: Path, node: int = 0) -> Path:
    """The texts of one node."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "diary.txt").write_text(LINES[node % len(LINES)] * 40)
    return place


def configured(place: Path, node: int = 0) -> dict[str, object]:
    """What a worker's ``Configure`` says of them."""
    return {"path": str(folder(place, node)), "task_entry": ENTRY}


def toml(terms: Workload) -> str:
    """``terms`` as a workload file."""
    task = terms.task
    assert isinstance(task, CustomTask)
    lines = [f"name = {json.dumps(terms.name)}", "[task]", 'kind = "custom"']
    lines += [f"entry = {json.dumps(task.entry)}", "[task.options]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in task.options.items()]
    lines += ["[task.parameters]"]
    lines += [f'"{name}" = {list(shape)}' for name, shape in task.parameters.items()]
    for table in ("inner", "outer", "field"):
        lines += [f"[{table}]"]
        told = getattr(terms, table).model_dump(mode="json")
        lines += [f"{key} = {json.dumps(value)}" for key, value in told.items()]
    return "\n".join(lines) + "\n"
