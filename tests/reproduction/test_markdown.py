from reproduction import markdown


def test_numbers_are_aligned_right_and_text_left():
    text = markdown.table(["", "F50", "U"], [["TENT", "1.0", "2.0"], ["IABN", "", "4.0"]])
    assert text == "| | F50 | U |\n|---|---:|---:|\n| TENT | 1.0 | 2.0 |\n| IABN |  | 4.0 |\n"
    text = markdown.table(["claim", "ours", "verdict"], [["x", "1", "holds"]], numbers=["ours"])
    assert text == "| claim | ours | verdict |\n|---|---:|---|\n| x | 1 | holds |\n"


def test_a_paragraph_is_indented_and_breaks_between_words_only():
    words = ["one-long-word-with-hyphens"] * 8
    lines = markdown.paragraph(" ".join(words), "> ").splitlines()
    assert len(lines) > 1
    assert all(line.startswith("> ") and len(line) <= 100 for line in lines)
    assert " ".join(line[2:] for line in lines).split() == words
