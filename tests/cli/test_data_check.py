from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tests.data import trees
from twoshift.cli.data import app
from twoshift.data import load
from twoshift.errors import SettingError, UnknownName

CORRUPTIONS = 15


def run(*arguments) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def rows(*arguments) -> tuple[int, list[dict]]:
    code, text = run(*arguments, "--json")
    return code, json.loads(text)


def test_a_whole_set(tmp_path):
    trees.make_visda_tree(tmp_path)
    code, text = run("check", "visda_c", "--data", tmp_path)
    assert code == 0
    assert text.splitlines()[:4] == [
        "visda_c (train): whole",
        "  labels   train_RS.txt of visda-c-rsut",
        "  images   21 of 21 found",
        "  classes  3, of 12 to 3 images (ratio 4.0)",
    ]
    assert "visda_c (test): whole" in text


def test_what_is_missing(tmp_path):
    trees.make_visda_tree(tmp_path)
    paths = load("visda_c", "train", tmp_path).images.paths
    for path in paths[3:11]:
        path.unlink()
    code, text = run("check", "visda_c", "--data", tmp_path, "--split", "train")
    assert code == 1
    missing = [line.split(maxsplit=1)[1] for line in text.splitlines() if "  missing" in line]
    assert missing == [*map(str, paths[3:8]), "... and 3 more"]
    assert "images   13 of 21 found" in text
    (row,) = rows("check", "visda_c", "--data", tmp_path, "--split", "train")[1]
    assert (row["images"], row["found"], row["whole"]) == (21, 13, False)
    assert row["missing"] == [*map(str, paths[3:8])]


def test_an_empty_tree(tmp_path):
    code, text = run("check", "office_home:clipart", "--data", tmp_path, "--split", "test")
    assert code == 1
    assert "lacks    its images: no folder 'Clipart'" in text
    assert "lacks    the list Clipart_UT.txt" in text
    assert text.count("https://") == 2


def test_a_name_without_its_part_checks_all_of_them(tmp_path):
    trees.make_domainnet_tree(tmp_path)
    code, found = rows("check", "domainnet", "--data", tmp_path)
    assert code == 0
    domains = ("clipart", "painting", "real", "sketch")
    expected = [(f"domainnet:{x}", split) for x in domains for split in ("train", "test")]
    assert [(row["name"], row["split"]) for row in found] == expected


def test_imagenet_c_tells_exactly_what_a_wrong_tree_lacks(tmp_path):
    trees.make_imagenet_tree(tmp_path)
    names = {"fog": "weather", "snow": "weather", "contrast": "digital"}
    trees.make_imagenet_c_tree(tmp_path, names, severities=(3,))
    lost = sorted((tmp_path / "ImageNet-C").rglob("snow/3/*/*"))[5]
    lost.unlink()
    code, found = rows("check", "imagenet_c", "--data", tmp_path)
    assert code == 1
    assert len(found) == CORRUPTIONS
    by_name = {row["name"].partition(":")[2]: row for row in found}
    assert {name for name, row in by_name.items() if row["whole"]} == {"fog", "contrast"}
    assert by_name["snow"]["missing"] == [str(lost)]
    assert by_name["snow"]["problems"] == []
    assert by_name["frost"]["problems"] == [f"the folder {tmp_path / 'ImageNet-C' / 'frost' / '3'}"]
    code, found = rows("check", "imagenet_c", "--data", tmp_path, "--severity", 5)
    assert all(row["problems"] for row in found)
    assert run("check", "imagenet_c:fog", "--data", tmp_path)[0] == 0


def test_images_that_cannot_be_decoded(tmp_path):
    trees.make_pacs_tree(tmp_path)
    bad = tmp_path / "pacs" / "photo" / "dog" / "pic_002.jpg"
    bad.write_bytes(bad.read_bytes()[:200])
    (tmp_path / "pacs" / "photo" / "dog" / "pic_000.jpg").write_text("a web page")
    arguments = ("check", "pacs:photo", "--data", tmp_path, "--split", "test")
    assert run(*arguments)[0] == 0
    code, text = run(*arguments, "--decode")
    assert code == 1
    told = [line for line in text.splitlines() if line.startswith("  bad ")]
    assert ["pic_000.jpg" in told[0], "pic_002.jpg" in told[1], len(told)] == [True, True, 2]


def test_empty_classes_are_told_but_no_fault(tmp_path):
    trees.make_visda_tree(tmp_path)
    (tmp_path / "lists" / "visda-c-rsut" / "category.txt").write_text(
        "\n".join([*trees.VISDA, "car"])
    )
    code, text = run("check", "visda_c", "--data", tmp_path)
    assert code == 0
    assert text.count("  empty    1 classes: car") == 2


def test_sets_without_files_of_their_own_are_loaded(tmp_path):
    code, found = rows("check", "digits8x8", "--data", tmp_path)
    assert code == 0
    assert [(row["images"], row["largest"], row["smallest"]) for row in found] == [
        (1200, 120, 120),
        (540, 54, 54),
    ]
    code, found = rows("check", "cifar10", "--data", tmp_path)
    assert code == 1
    assert "twoshift data get cifar10" in found[0]["problems"][0]


def test_a_damaged_list_is_told(tmp_path):
    (tmp_path / "mine.txt").write_text("cat/1.jpg cat\n")
    code, text = run("check", f"list:{tmp_path / 'mine.txt'}", "--data", tmp_path)
    assert code == 1
    assert "line 1 of" in text


def test_names_and_splits_are_checked(tmp_path):
    with pytest.raises(UnknownName, match="Did you mean 'imagenet_c'"):
        run("check", "imagenetc", "--data", tmp_path)
    with pytest.raises(SettingError, match="split"):
        run("check", "visda_c", "--data", tmp_path, "--split", "val")
    with pytest.raises(SettingError, match="split of imagenet_c, must be 'test'"):
        run("check", "imagenet_c", "--data", tmp_path, "--split", "train")


def test_ls_tells_whole_partial_and_missing(tmp_path):
    trees.make_pacs_tree(tmp_path)
    trees.make_domainnet_tree(tmp_path)
    next((tmp_path / "domainnet" / "real").rglob("*.jpg")).unlink()
    found = {row["name"]: row for row in rows("ls", "--data", tmp_path)[1]}
    assert found["pacs"]["state"] == "whole"
    assert found["pacs"]["where"] == str(tmp_path / "pacs")
    assert found["domainnet"]["state"] == "partial"
    assert found["visda_c"]["state"] == found["imagenet_lt"]["state"] == "missing"


def test_ls_survives_a_damaged_list(tmp_path):
    trees.make_pacs_tree(tmp_path)
    trees.make_visda_tree(tmp_path)
    (tmp_path / "lists" / "visda-c-rsut" / "train_RS.txt").write_text("not a list\n")
    found = {row["name"]: row["state"] for row in rows("ls", "--data", tmp_path)[1]}
    assert (found["visda_c"], found["pacs"]) == ("damaged", "whole")
    assert "damaged" in run("ls", "--data", tmp_path)[1]


def test_rsut_writes_two_lists(tmp_path):
    trees.make_pacs_tree(tmp_path)
    out = tmp_path / "out"
    code, text = run(
        *("rsut", "pacs:photo", "--target", "pacs:cartoon", "--ratio", 3, "--order", "size"),
        *("--out", out, "--data", tmp_path),
    )
    assert code == 0
    for line, file in zip(text.splitlines(), ("pacs-photo_RS", "pacs-cartoon_UT"), strict=True):
        assert line.endswith(f"use it as list:{out / file}.txt")
        lines = (out / f"{file}.txt").read_text().splitlines()
        assert line.startswith(f"{len(lines)} images")
        assert run("check", f"list:{out / file}.txt")[0] == 0
