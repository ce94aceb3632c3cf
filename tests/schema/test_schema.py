"""The schema of a run: its head in JSON, and the promised columns of its tables."""

import dataclasses
import json
import math
import sys

import pyarrow as pa
import pytest

from amp_core.schema import SCHEMA, STATUSES, TABLES, Head, RunError

PROMISED = {
    "steps": "step time_s loss loss_scale skipped growth_tracker grad_norm lr samples step_ms data_ms forward_ms "
    "backward_ms optimizer_ms watch_ms memory_allocated_bytes memory_peak_bytes rank",
    "tensors": "step name kind dtype loss_scale numel zero subnormal normal inf nan absmax rms exp_min exp_counts rank",
    "blocks": "step name kind product dtype block scaling nonzero absmax counts ties rank",
    "quantized": "step name kind product recipe library element block dtype numel nonzero amax scale scale_max "
    "scale_age saturated_frac underflow_frac underflow_mass_frac sq_error rel_error casts calls rank",
    "device": "time_s index gpu_util_frac memory_used_bytes power_w temperature_c sm_active_frac tensor_active_frac "
    "dram_active_frac",
    "kernels": "step name count total_us tensor_core precision op module phase",
    "windows": "step steps device device_name wall_us busy_us idle_us data_us launches cast_us sync_us syncs",
    "collectives": "step number name group group_size dtype message_bytes total_us alone_us phase device kernel rank",
    "timeline": "step name start_us total_us queue_us stream device category tensor_core phase module op rank",
    "ops": "step module op policy in_dtypes out_dtype count cast_bytes",
    "audits": "step name loss_scale precision numel lost lost_mass_frac rel_error cosine",
    "updates": "step name elements unchanged_frac lost_mass_frac lost_decay_frac",
    "averages": "step name dtype elements unchanged_frac lost_mass_frac decay",
    "memory": "step number moment name phase device allocated_bytes peak_bytes reserved_bytes parameters_bytes "
    "buffers_bytes gradients_bytes optimizer_bytes activations_bytes autocast_bytes rank",
    "events": "step time_s kind name detail",
}

HEAD = Head(run_id="a1", name="n", created_at="2026-01-01T00:00:00+00:00")


def read(**changes: object) -> Head:
    return Head.from_json(json.dumps(json.loads(HEAD.to_json()) | changes), "run.json")


def test_tables_have_every_promised_column() -> None:
    assert list(TABLES) == list(PROMISED)
    for name, columns in PROMISED.items():
        have = [c.name for c in TABLES[name].columns]
        assert set(columns.split()) <= set(have) and len(set(have)) == len(have)


def test_columns_have_a_description_and_a_default_of_their_type() -> None:
    for table in TABLES.values():
        assert table.doc and set(table.order) <= {c.name for c in table.columns}
        assert table.schema.names == [c.name for c in table.columns]
        for column in table.columns:
            assert column.doc
            assert not (column.required and column.default is not None)
            assert pa.scalar(column.default, column.type).as_py() == column.default


def test_column_names_contain_their_units() -> None:
    for table in TABLES.values():
        for column in table.columns:
            if column.name.endswith(("_bytes", "_counts")) or column.name in ("step", "rank", "numel"):
                assert column.type in (pa.int64(), pa.list_(pa.int64())), column.name
            if column.name.endswith(("_ms", "_s", "_us", "_frac", "_w", "_c")):
                assert column.type == pa.float64(), column.name


def test_the_head_survives_json() -> None:
    head = dataclasses.replace(
        HEAD, status="failed", end_reason="ü", config={"a": [1, None, {"b": True}]}, world_size=8, results={"x": 1.5}
    )
    assert Head.from_json(head.to_json(), "run.json") == head
    assert Head.from_json(head.to_json().encode(), "run.json") == head


def test_values_without_a_json_form_become_strings() -> None:
    config = {"lr": math.nan, "big": math.inf, "where": ("x", {1}), 3: b"b", "dtype": dataclasses.MISSING.__class__}
    text = dataclasses.replace(HEAD, config=config).to_json()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    read_back = Head.from_json(text, "run.json").config
    assert read_back["lr"] == "nan" and read_back["big"] == "inf" and read_back["where"] == ["x", [1]]
    assert read_back["3"] == "b'b'"


def test_a_head_that_is_nested_deeply_is_refused_whatever_the_process_allows() -> None:
    text = '{"schema": 1, "config": ' + '{"a":' * 700 + "1" + "}" * 701
    allowed = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # torch.compile raises it too
    try:
        with pytest.raises(RunError, match=r"run\.json is not a run head"):
            Head.from_json(text, "run.json")
    finally:
        sys.setrecursionlimit(allowed)


def test_unknown_fields_are_kept_and_written_again() -> None:
    head = read(colour="red", nested={"x": 1})
    assert head.extra == {"colour": "red", "nested": {"x": 1}}
    assert json.loads(head.to_json())["colour"] == "red"
    assert Head.from_json(head.to_json(), "run.json") == head


def test_missing_and_null_fields_get_their_defaults() -> None:
    head = Head.from_json('{"schema": 1, "name": null, "config": null}', "run.json")
    assert (head.name, head.status, head.config, head.world_size, head.end_reason) == ("", "running", {}, 1, None)


def test_a_newer_schema_is_refused_with_one_sentence() -> None:
    with pytest.raises(RunError, match=rf"run\.json has schema={SCHEMA + 1}, which is newer than this AMPscope reads"):
        read(schema=SCHEMA + 1, status={"something": "new"})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("schema", None, "schema=None; a run head gives a whole number"),
        ("schema", True, "schema=True; a run head gives a whole number"),
        ("schema", "1", "schema='1'; a run head gives a whole number"),
        ("schema", 0, "schema=0; a run head gives a whole number"),
        ("schema", 1.0, "schema=1.0; a run head gives a whole number"),
        ("name", 3, "name=3; it must be of type str"),
        ("config", [], r"config=\[\]; it must be of type dict"),
        ("status", "lost", f"status='lost'; it must be one of {', '.join(STATUSES)}"),
        ("status", "x" * 500, "status='xxx"),
        ("world_size", 0, "world_size=0; it must be 1 or more"),
        ("world_size", "2", "world_size='2'; it must be of type int"),
        ("world_size", True, "world_size=True; it must be of type int"),
        ("end_reason", {"a": 1}, "end_reason={'a': 1}; it must be of type str"),
        ("process", 7, "process=7; it must be of type dict"),
    ],
)
def test_fields_of_a_wrong_type_raise_one_sentence(field: str, value: object, says: str) -> None:
    with pytest.raises(RunError, match=says) as caught:
        read(**{field: value})
    assert str(caught.value).startswith("run.json has ") and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '"x"', "{} {}", b"\xff\xfe", b"\x80", "[" * 100_000, '{"schema": ' + "9" * 5000 + "}"],
)
def test_text_that_is_not_a_head_raises_one_sentence(text: str | bytes) -> None:
    with pytest.raises(RunError, match=r"run\.json is not a run head|run\.json has schema=None") as caught:
        Head.from_json(text, "run.json")
    assert "\n" not in str(caught.value)


def test_every_head_that_can_be_read_can_be_written() -> None:
    for depth in (10, 100, 200, 300, 400, 500, 700, 900, 2000):
        text = '{"schema": 1, "config": ' + '{"a":' * depth + "1" + "}" * (depth + 1)
        try:
            head = Head.from_json(text, "run.json")
        except RunError:
            assert depth > 100
            continue
        assert Head.from_json(head.to_json(), "run.json") == head


def test_run_error_is_a_value_error() -> None:
    assert issubclass(RunError, ValueError)
