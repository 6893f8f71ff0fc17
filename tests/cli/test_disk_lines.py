"""What a GGUF file takes on disk and in memory: in `plan` as text, JSON and page, in `run`, and where it does not fit."""

import json
from pathlib import Path

from cli.cli_models import Here
from cli.page_reader import read_page
from loading.block_files import expanded, model_tensors, write_tensors

DISK = "on disk    93.81 MiB: 210 Q4_1, 61 F32, 1 Q8_0"


def test_plan_gguf_shows_disk_size_in_text_json_and_page(here: Here, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    ended = here("plan", "--gpu", "h200", "--html", page)
    assert ended.code == 0, ended
    lines = ended.out.splitlines()
    place = lines.index(DISK)
    assert lines[place + 1] == "in memory  92.04 MiB: 121 of 121 packed weights stay as stored"
    words = [part.text for part in read_page(page.read_text(encoding="utf-8")).all("p")]
    assert "on disk 93.81 MiB: 210 Q4_1, 61 F32, 1 Q8_0" in words
    found = json.loads(here("plan", "--gpu", "h200", "--json").out)["weights_on_disk"]
    assert (found["disk_bytes"], found["num_files"], found["memory_bytes"]) == (98_362_432, 1, 96_514_304)
    assert found["types"]["Q4_1"]["tensors"] == 210
    expanded_text = here("plan", "--gpu", "h200", "--packed-weights", "expanded").out
    assert "in memory  256.57 MiB: blocks are expanded to bfloat16 as they load" in expanded_text
    assert "           --quantization int8 would hold 129.11 MiB" in expanded_text
    found = json.loads(here("plan", "--gpu", "h200", "--packed-weights", "expanded", "--json").out)["weights_on_disk"]
    assert found["less_with"] == {"int8": 135_376_640}


def test_plan_gguf_nvfp4_counts_factors_on_disk_and_expanded_values_in_memory(here: Here, tmp_path: Path) -> None:
    path, tensors = tmp_path / "blocks.gguf", model_tensors("NVFP4")
    write_tensors(path, tensors)
    ended = here("plan", path, "--gpu", "h200", "--packed-weights", "expanded", "--json")
    assert ended.code == 0, ended
    found = json.loads(ended.out)["weights_on_disk"]
    blocks = [stored.raw.nbytes for stored in tensors.values() if stored.kind == "NVFP4"]
    assert found["disk_bytes"] == path.stat().st_size
    assert found["types"]["NVFP4"] == {"tensors": len(blocks), "bytes": sum(blocks)}
    in_bfloat16 = [stored.raw.nbytes // 2 for stored in expanded(tensors).values()]
    assert found["memory_bytes"] == sum(-(-num_bytes // 256) * 256 for num_bytes in in_bfloat16)


def test_plan_folder_has_no_weights_on_disk(here: Here, tiny: Path) -> None:
    ended = here("plan", tiny, "--gpu", "h200", "--json")
    assert "weights_on_disk" not in json.loads(ended.out)


def test_run_gguf_shows_disk_size_in_text_and_json(here: Here) -> None:
    options = ("-p", "Hi", "--max-tokens", "1", "--max-model-len", "64", "--quantization", "int8")
    ended = here("run", *options)
    assert ended.code == 0, ended
    assert "seconds, from 93.81 MiB on disk\n" in ended.err
    assert f"{DISK}\nin memory  129.16 MiB: blocks are quantized again, to int8, as they load\n" in ended.err
    held = json.loads(here("run", *options, "--json").out)["memory"]
    (weights,) = [row["held_bytes"] for row in held["rows"] if row["owner"] == "weights"]
    assert held["weights_on_disk"]["memory_bytes"] == weights


def test_run_gguf_over_budget_states_bytes_as_stored(here: Here) -> None:
    ended = here("run", "-p", "Hi", "--memory-limit", "256MiB")
    assert ended.code != 0
    assert ended.refuses("plan.over_budget"), ended
    assert "92.10 MiB in memory, since 121 of 121 packed weights stay as stored" in ended.err
