"""The table of targets with two bounds."""

from benchkit.report import must_and_aim
from benchkit.report.must_and_aim import Reached, Target

SPEED = Target("attention", 1.0, 1.3, "times")
SHARE = Target("bias_gelu", 0.80, 0.95, "share")


def test_a_row_says_which_bound_is_reached() -> None:
    found = [
        Reached(SPEED, 0.9994, "", "it is slow."),
        Reached(SPEED, 1.1, "512 tokens", "unused."),
        Reached(SPEED, 1.3, "", "unused."),
        Reached(SHARE, 0.795, "", "it is slow too."),
        Reached(SHARE, 0.794, "", "it is slowest."),
    ]
    assert must_and_aim.rows(found) == [
        ("attention", "1.00×", "1.30×", "0.999×", "**no**"),
        ("attention", "1.00×", "1.30×", "1.10× (512 tokens)", "yes"),
        ("attention", "1.00×", "1.30×", "1.30×", "yes, and the aim"),
        ("bias_gelu", "80 %", "95 %", "80 %", "yes"),  # as many digits decide as are shown
        ("bias_gelu", "80 %", "95 %", "79 %", "**no**"),
    ]
    assert must_and_aim.reasons(found) == ["attention: it is slow.", "bias_gelu: it is slowest."]


def test_what_is_fast_and_inaccurate_is_missed() -> None:
    found = Reached(SPEED, 2.0, "", "its error is larger.", accurate=False)
    assert found.row()[-1] == "**no**"
    assert must_and_aim.reasons([found]) == ["attention: its error is larger."]
