"""Names of models on the Hub: every way that people type them, and what is a path."""

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ConfigError
from holdfast.loading.hub.names import HubName, is_revision, parse_hub_name

REPO = "Qwen/Qwen3-8B"


@for_each(
    "text, name",
    [
        (REPO, HubName(REPO)),
        (f"{REPO}@main", HubName(REPO, "main")),
        (f"{REPO}@refs/pr/4", HubName(REPO, "refs/pr/4")),
        (f"{REPO}:Q4_K_M", HubName(REPO, None, "Q4_K_M")),
        (f"{REPO}:latest", HubName(REPO)),
        (f"{REPO}:LATEST", HubName(REPO)),
        (f"{REPO}:Q4_K_M@v1.0", HubName(REPO, "v1.0", "Q4_K_M")),
        (f"{REPO}@v1.0:Q4_K_M", HubName(REPO, "v1.0", "Q4_K_M")),
        (f"hf.co/{REPO}", HubName(REPO, is_explicit=True)),
        (f"hf.co/{REPO}:UD-Q4_K_XL", HubName(REPO, None, "UD-Q4_K_XL", is_explicit=True)),
        (f"huggingface.co/{REPO}", HubName(REPO, is_explicit=True)),
        (f"https://huggingface.co/{REPO}/", HubName(REPO, is_explicit=True)),
        (f"https://huggingface.co/{REPO}/tree/v2", HubName(REPO, "v2", is_explicit=True)),
        (f"https://huggingface.co/{REPO}/blob/main/a-Q8_0.gguf", HubName(REPO, "main", None, "a-Q8_0.gguf", True)),
        (f"hf://{REPO}", HubName(REPO, is_explicit=True)),
        (f"{REPO}/Q8_0/a-00001-of-00002.gguf", HubName(REPO, None, None, "Q8_0/a-00001-of-00002.gguf")),
    ],
)
def test_parse_hub_name_reads_each_way_to_write_a_name(text, name):
    assert parse_hub_name(text) == name


@for_each(
    "text",
    [
        *("", "Qwen3-8B", "/models/qwen", "./models/qwen", "~/models/qwen", "../a/b", "a/b/c", "a//b", "a/b/"),
        *("models/qwen.gguf", "models/model.safetensors", "a/..", "a/b@../../etc", "a/b@x//y", "a/b:c/d", "a--b/c"),
        *("a/b:x:y", "a/b@x@y", "a/b@", "a/b:", "a b/c", "a/b\0", "ä/b", "x" * 600 + "/y", "hf.co/onlyname"),
    ],
)
def test_parse_hub_name_of_a_path_or_junk_is_none(text):
    assert parse_hub_name(text) is None


@for_each("text", ["main", "v1.0", "refs/pr/12", "0" * 40, "feature+x"])
def test_revision_check_accepts_valid_revisions(text):
    assert is_revision(text)


@for_each("text", ["", "..", "a/../b", "/a", "a/", "a.lock", "a b", "-x", "a\n", "x" * 300])
def test_revision_check_rejects_invalid_revisions(text):
    assert not is_revision(text)


def test_hub_name_at_another_revision_is_refused():
    name = parse_hub_name(f"{REPO}@v1")
    assert name is not None
    assert name.at("v1") == name.at(None) == name
    with raises_code("hub.revision_twice", ConfigError):
        name.at("v2")


@for_each(
    "text, command",
    [
        (REPO, f"hf download {REPO}"),
        (f"{REPO}:q4_k_m", f'hf download {REPO} --include "*Q4_K_M*.gguf" --include "*q4_k_m*.gguf"'),
        (f"{REPO}:Q4_K_M@v1", f'hf download {REPO} --include "*Q4_K_M*.gguf" --include "*q4_k_m*.gguf" --revision v1'),
        (f"{REPO}/sub/a-Q8_0.gguf@v1", f"hf download {REPO} sub/a-Q8_0.gguf --revision v1"),
        (f"{REPO}/a-00001-of-00003.gguf", f'hf download {REPO} --include "a-*-of-00003.gguf"'),
    ],
)
def test_hub_name_download_is_the_hf_command(text: str, command: str) -> None:
    name = parse_hub_name(text)
    assert name is not None
    assert name.download == command


def test_hub_name_text_parses_back_to_the_name():
    for text in (REPO, f"{REPO}:Q4_K_M@v1", f"{REPO}/a.gguf@v1"):
        name = parse_hub_name(text)
        assert name is not None
        assert parse_hub_name(name.text) == name
    assert HubName(REPO, "v1", "Q8_0").label == "Qwen3-8B:Q8_0"
