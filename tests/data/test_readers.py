from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tests.data import trees
from twoshift.data import ImageSet, load
from twoshift.data._inventory import take_inventory
from twoshift.data.corrupted import corrupted
from twoshift.errors import DataError, DataMissing, MismatchError, SettingError, UnknownName

SMALL = {"size": 16, "frame": 20}
READERS = [  # name, function that makes its tree, lists of train and test
    (
        "imagenet_lt",
        trees.make_imagenet_tree,
        ("imagenet-lt/ImageNet_LT_train.txt", "imagenet-lt/ImageNet_LT_test.txt"),
    ),
    (
        "visda_c",
        trees.make_visda_tree,
        ("visda-c-rsut/train_RS.txt", "visda-c-rsut/validation_UT.txt"),
    ),
    (
        "office_home:clipart",
        trees.make_office_home_tree,
        ("office-home-rsut/Clipart_RS.txt", "office-home-rsut/Clipart_UT.txt"),
    ),
    (
        "office_home:real_world",
        trees.make_office_home_tree,
        ("office-home-rsut/RealWorld_RS.txt", "office-home-rsut/RealWorld_UT.txt"),
    ),
    (
        "domainnet:sketch",
        trees.make_domainnet_tree,
        ("domainnet-40/sketch_train_mini.txt", "domainnet-40/sketch_test_mini.txt"),
    ),
]
NAMES = [name for name, _, _ in READERS]
CLASSES = {
    "imagenet_lt": trees.IMAGENET,
    "visda_c": trees.VISDA,
    "office_home": trees.OFFICE_HOME,
    "domainnet": trees.DOMAINNET,
}


@pytest.fixture(scope="module", params=READERS, ids=NAMES)
def tree(request, tmp_path_factory):
    name, make, lists = request.param
    return name, make(tmp_path_factory.mktemp("tree")), lists


@pytest.mark.parametrize("split", ["train", "test"])
def test_images_and_labels_follow_the_list(tree, split):
    name, root, lists = tree
    data = load(name, split, root, **SMALL)
    lines = (root / "lists" / lists[split == "test"]).read_text().splitlines()
    assert len(data) == len(lines)
    assert data.images.shape == (len(lines), 16, 16, 3)
    assert data.name == name
    assert data.classes == CLASSES[name.partition(":")[0]]
    assert f"{len(lines)} images" in data.origin
    assert str(root) not in data.origin
    for line, path, label in zip(lines, data.images.paths, data.labels, strict=True):
        listed, number = line.split()
        assert path.parts[-2:] == tuple(listed.split("/")[-2:])
        assert label == int(number)
        assert data.classes[label] == path.parent.name
        assert path.is_file()


def test_pixels_equal_those_of_the_files(tree):
    name, root, _ = tree
    data = load(name, "test", root, size=24, frame=24, squash=True)
    with Image.open(data.images.paths[-1]) as image:
        expected = np.asarray(image.convert("RGB").resize((24, 24), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(data.images[np.array([len(data) - 1])][0], expected)


def test_source_and_target_have_opposite_tails(tmp_path):
    trees.make_visda_tree(tmp_path)
    trees.make_office_home_tree(tmp_path)
    for source, target in (("visda_c", "visda_c"), ("office_home:clipart", "office_home:product")):
        train, test = (
            load(source, "train", tmp_path, **SMALL),
            load(target, "test", tmp_path, **SMALL),
        )
        assert train.counts.tolist() == test.counts.tolist()[::-1] == list(trees.TAIL)
        assert test.aligned(train.classes) is test


def test_missing_images_are_counted_and_the_first_five_named(tmp_path):
    trees.make_visda_tree(tmp_path)
    paths = load("visda_c", "train", tmp_path, **SMALL).images.paths
    for path in paths[2:9]:
        path.unlink()
    with pytest.raises(DataMissing, match="7 of 21 images") as caught:
        load("visda_c", "train", tmp_path, **SMALL)
    for i, path in enumerate(paths):
        assert (str(path) in str(caught.value)) == (2 <= i < 7)
    assert "ai.bu.edu" in str(caught.value)
    assert len(load("visda_c", "test", tmp_path, **SMALL)) == 21


def test_images_must_be_in_the_folders_of_their_classes(tmp_path):
    trees.make_visda_tree(tmp_path)
    train = tmp_path / "visda-c" / "train"
    for path in list(train.glob("*/*")):
        path.rename(train / path.name)
    with pytest.raises(DataMissing, match="21 of 21 images"):
        load("visda_c", "train", tmp_path, **SMALL)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_data_set_is_an_error_with_its_addresses(tmp_path, name):
    with pytest.raises(DataMissing, match=f"{name} .train. lacks its images") as caught:
        load(name, "train", tmp_path, **SMALL)
    assert "lacks the list" in str(caught.value)
    assert "https://" in str(caught.value)


def test_lists_without_images_still_give_the_counts(tree, tmp_path):
    name, root, lists = tree
    for file in lists:
        (tmp_path / "lists" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lists" / file).write_text((root / "lists" / file).read_text())
    for split in ("train", "test"):
        full, empty = take_inventory(name, split, root), take_inventory(name, split, tmp_path)
        assert empty.counts.tolist() == full.counts.tolist()
        assert (empty.images_on_disk, full.images_on_disk) == (0, len(full.paths))
        assert empty.classes == full.classes
        assert not empty.whole


@pytest.mark.parametrize(
    ("name", "make", "old", "new"),
    [
        ("imagenet_lt", trees.make_imagenet_tree, "imagenet", "ILSVRC2012"),
        ("visda_c", trees.make_visda_tree, "visda-c", "VISDA-C"),
        ("domainnet:real", trees.make_domainnet_tree, "domainnet", "DomainNet"),
        (
            "office_home:product",
            trees.make_office_home_tree,
            "OfficeHomeDataset_10072016",
            "office-home/images",
        ),
        (
            "office_home:real_world",
            trees.make_office_home_tree,
            "OfficeHomeDataset_10072016/Real World",
            "OfficeHome/RealWorld",
        ),
    ],
)
def test_folders_may_have_their_alternative_names(tmp_path, name, make, old, new):
    make(tmp_path)
    (tmp_path / new).parent.mkdir(exist_ok=True)
    (tmp_path / old).rename(tmp_path / new)
    assert load(name, "test", tmp_path, **SMALL).images.paths[0].is_relative_to(tmp_path / new)


def test_lists_may_lie_beside_the_images_and_the_root_may_be_the_set(tmp_path):
    trees.make_office_home_tree(tmp_path)
    home = tmp_path / "OfficeHomeDataset_10072016"
    for file in (tmp_path / "lists" / "office-home-rsut").iterdir():
        file.rename(home / file.name)
    for root in (tmp_path, home):
        data = load("office_home:real_world", "train", root, **SMALL)
        assert data.images.paths[0].parts[-3] == "Real World"
        assert data.counts.tolist() == [12, 6, 3]


def test_a_domain_is_never_mistaken_for_another_one(tmp_path):
    trees.make_office_home_tree(tmp_path)  # all domains have files of the same names
    (tmp_path / "OfficeHomeDataset_10072016" / "Product").rename(tmp_path / "elsewhere")
    with pytest.raises(DataMissing, match="no folder 'Product'"):
        load("office_home:product", "test", tmp_path, **SMALL)


def test_art_has_no_lists(tmp_path):
    trees.make_office_home_tree(tmp_path)
    with pytest.raises(DataMissing, match=r"art has no RSUT lists.*folder:PATH/Art"):
        load("office_home:art", "train", tmp_path)
    art = tmp_path / "OfficeHomeDataset_10072016" / "Art"
    assert load(f"folder:{art}", "train", **SMALL).counts.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("office_home:clip", UnknownName, "Did you mean 'clipart'"),
        ("domainnet:photo", UnknownName, "Known: clipart, painting, real, sketch"),
        ("pacs:sketches", UnknownName, "Did you mean 'sketch'"),
        ("pacs", SettingError, "followed by one of its parts"),
        ("visda_c:train", SettingError, "without a part"),
    ],
)
def test_parts_are_checked(tmp_path, name, error, message):
    for call in (
        lambda: load(name, "train", tmp_path),
        lambda: take_inventory(name, "train", tmp_path),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("name", [*NAMES, "pacs:photo", "folder:x", "list:x", "arrays:x"])
def test_other_splits_are_refused(tmp_path, name):
    with pytest.raises(SettingError, match="split"):
        load(name, "validation", tmp_path)


def test_an_unknown_class_is_an_error_and_an_empty_one_is_not(tmp_path):
    trees.make_visda_tree(tmp_path)
    lists = tmp_path / "lists" / "visda-c-rsut"
    source = [x for x in (lists / "train_RS.txt").read_text().splitlines() if x.endswith(" 0")]
    (lists / "train_RS.txt").write_text("\n".join(source))
    (lists / "category.txt").unlink()
    train, test = (load("visda_c", split, tmp_path, **SMALL) for split in ("train", "test"))
    assert train.classes == ("aeroplane",)
    with pytest.raises(MismatchError, match=r"2 classes .* not trained on: bicycle, bus"):
        test.aligned(train.classes)
    (lists / "category.txt").write_text("\n".join(trees.VISDA))
    train = load("visda_c", "train", tmp_path, **SMALL)
    assert train.counts.tolist() == [12, 0, 0]
    assert take_inventory("visda_c", "train", tmp_path).empty == ("bicycle", "bus")
    assert test.aligned(train.classes).labels.tolist() == test.labels.tolist()


@pytest.mark.parametrize(
    ("classes", "others", "owner"), [("xxy", "xyz", "toy"), ("xy", "xyx", "the model")]
)
def test_classes_with_the_same_name_are_not_merged(classes, others, owner):
    images = np.zeros((len(classes), 4, 4, 3), np.uint8)
    data = ImageSet("toy", "test", images, np.arange(len(classes)), tuple(classes))
    with pytest.raises(MismatchError, match=f"classes of {owner}, .*more than one x"):
        data.aligned(tuple(others))


@pytest.mark.parametrize("folder", ["pacs", "PACS", "pacs/kfold", "."])
def test_pacs(tmp_path, folder):
    trees.make_pacs_tree(tmp_path, folder)
    for domain in ("photo", "art_painting", "cartoon", "sketch"):
        data = load(f"pacs:{domain}", "train", tmp_path, **SMALL)
        expected = sorted((tmp_path / folder / domain).rglob("*.jpg"))
        assert list(data.images.paths) == expected
        assert [data.classes[label] for label in data.labels] == [x.parent.name for x in expected]
        assert load(f"pacs:{domain}", "test", tmp_path, **SMALL).images.paths == data.images.paths


def test_pacs_allows_an_empty_class_but_no_missing_folder(tmp_path):
    trees.make_pacs_tree(tmp_path)
    for file in (tmp_path / "pacs" / "photo" / "guitar").iterdir():
        file.unlink()
    (tmp_path / "pacs" / "photo" / "horse" / "Thumbs.db").touch()
    data = load("pacs:photo", "train", tmp_path, **SMALL)
    assert data.counts[trees.PACS.index("guitar")] == 0
    assert len(data.classes) == 7
    inventory = take_inventory("pacs:photo", "train", tmp_path)
    assert inventory.empty == ("guitar",)
    assert "1 files" in inventory.notes[0]
    (tmp_path / "pacs" / "photo" / "guitar").rmdir()
    with pytest.raises(DataError, match=r"lacks the folder .*guitar"):
        load("pacs:photo", "train", tmp_path, **SMALL)


def test_a_missing_domain_is_one_problem(tmp_path):
    assert take_inventory("pacs:photo", "train", tmp_path).problems == (
        f"class folders in {tmp_path / 'pacs' / 'photo'}",
    )


def test_the_real_pacs(shared_data):
    counts = {  # as published
        "photo": [189, 202, 182, 186, 199, 280, 432],
        "art_painting": [379, 255, 285, 184, 201, 295, 449],
        "cartoon": [389, 457, 346, 135, 324, 288, 405],
        "sketch": [772, 740, 753, 608, 816, 80, 160],
    }
    for domain, expected in counts.items():
        data = load(f"pacs:{domain}", "test", shared_data, size=112, frame=128)
        assert data.counts.tolist() == expected
    assert data.images[np.array([0, 3000])].shape == (2, 112, 112, 3)


@pytest.mark.parametrize("group", ["", "weather"])
def test_imagenet_c_is_checked_against_the_list(tmp_path, group):
    trees.make_imagenet_tree(tmp_path)
    trees.make_imagenet_c_tree(tmp_path, {"fog": group, "frost": group}, severities=(3,))
    assert take_inventory("imagenet_c:fog", "test", tmp_path, severity=3).whole
    removed = sorted((tmp_path / "ImageNet-C").rglob("fog/3/*/*"))[:2]
    for path in removed:
        path.unlink()
    fog = take_inventory("imagenet_c:fog", "test", tmp_path, severity=3)
    assert (sorted(fog.missing), fog.images_on_disk) == ([str(path) for path in removed], 22)
    assert "fog/5" in take_inventory("imagenet_c:fog", "test", tmp_path, severity=5).problems[0]
    assert take_inventory("imagenet_c:frost", "test", tmp_path).whole
    assert "ImageNet-C/snow/3" in take_inventory("imagenet_c:snow", "test", tmp_path).problems[0]


def test_imagenet_c_needs_the_list_but_no_clean_images(tmp_path):
    trees.make_imagenet_tree(tmp_path)
    trees.make_imagenet_c_tree(tmp_path, {"fog": ""})
    (tmp_path / "imagenet").rename(tmp_path / "elsewhere")
    assert take_inventory("imagenet_c:fog", "test", tmp_path).whole
    (tmp_path / "lists").rename(tmp_path / "other")
    inventory = take_inventory("imagenet_c:fog", "test", tmp_path)
    assert not inventory.whole
    assert "ImageNet_LT_test.txt" in str(inventory.error())


def test_imagenet_c_is_read_without_the_clean_images(tmp_path):
    trees.make_imagenet_tree(tmp_path)
    trees.make_imagenet_c_tree(tmp_path, {"fog": "weather"}, severities=(3, 5))
    clean = load("imagenet_lt", "test", tmp_path, **SMALL)
    for severity in (3, 5):
        name = f"imagenet_c:fog-{severity}"
        data = load(name, "test", tmp_path, **SMALL)
        expected = corrupted(clean, "fog", severity, root=tmp_path)
        assert (data.name, data.split, data.classes) == (name, "test", clean.classes)
        assert data.images.paths == expected.images.paths
        np.testing.assert_array_equal(data.images[:], expected.images[:])
        assert data.labels.tolist() == clean.labels.tolist()
        assert f"ImageNet-C/weather/fog/{severity}" in data.origin
        assert take_inventory(name, "test", tmp_path).whole
    (tmp_path / "imagenet").rename(tmp_path / "elsewhere")
    assert len(load("imagenet_c:fog-5", "test", tmp_path, **SMALL)) == len(clean)
    with pytest.raises(DataMissing, match="fog/4"):
        load("imagenet_c:fog-4", "test", tmp_path, **SMALL)
    with pytest.raises(UnknownName, match="Did you mean 'fog'"):
        load("imagenet_c:fogg-3", "test", tmp_path, **SMALL)
    with pytest.raises(SettingError, match="'test'"):
        load("imagenet_c:fog-3", "train", tmp_path, **SMALL)
    with pytest.raises(SettingError, match="followed by one of its parts"):
        load("imagenet_c", "test", tmp_path, **SMALL)


@pytest.mark.parametrize(
    ("split", "severity", "part"),
    [
        ("train", 3, "fog"),
        ("test", 0, "fog"),
        ("test", 6, "fog"),
        ("test", 3, "fog-6"),
        ("test", 3, "fog-x"),
    ],
)
def test_imagenet_c_has_test_images_of_five_severities(tmp_path, split, severity, part):
    with pytest.raises(SettingError):
        take_inventory(f"imagenet_c:{part}", split, tmp_path, severity=severity)
