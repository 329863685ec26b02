from spillway_settings.values.comments import comments_by_setting

TEXT = """\
# A file.

# ---- A part ------
# What a is for,
# in two lines.
a:
  # Of b.
  b: 1   # tokens
  c: "x # y"
  d: {e: 1}  # both

  # Alone.

  f: 2
g: 3
"""


def test_a_comment_belongs_to_the_setting_below_or_before_it() -> None:
    assert comments_by_setting(TEXT) == {
        "a": "What a is for, in two lines.",
        "a.b": "Of b. tokens",
        "a.d": "both",
    }


def test_text_with_a_hash_is_no_comment() -> None:
    assert comments_by_setting('a: "x # y"\nb: "#"\nc: x#y\n') == {}


def test_a_comment_keeps_its_quoted_words() -> None:
    text = 'a: "x # y"  # "": none; see "On a # b"\n'
    assert comments_by_setting(text) == {"a": '"": none; see "On a # b"'}
