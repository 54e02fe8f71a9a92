"""Whether an image's stamp can be believed and is recent enough."""

from specvla_ros.engine.outcome import DropReason

_NS = 1e-9
_DAY_S = 86_400.0


def stamp_problem(
    stamp_ns: int, now_ns: int, *, max_age_s: float, max_future_s: float
) -> tuple[DropReason, str] | None:
    """Why an image of this stamp must not be answered now; None when it may.

    Args:
        stamp_ns: of the image.
        now_ns: the node's clock; 0 before the first /clock.
        max_age_s: 0 switches the age check off.
        max_future_s: how far a stamp may lie ahead.
    """
    if now_ns == 0:
        return (
            DropReason.BAD_STAMP,
            "use_sim_time is set, but nothing came on /clock yet: is a bag or simulator running?",
        )
    age_s = (now_ns - stamp_ns) * _NS
    if -age_s > max_future_s:
        return DropReason.BAD_STAMP, f"stamped {-age_s:.3f} s ahead of the node's clock{_other_clock(age_s)}"
    if max_age_s and age_s > max_age_s:
        return DropReason.STALE, f"{age_s:.3f} s old, the limit is {max_age_s:g} s{_other_clock(age_s)}"
    return None


def _other_clock(age_s: float) -> str:
    if abs(age_s) < _DAY_S:
        return ""
    return (
        f": {abs(age_s) / _DAY_S:.0f} days apart are two different clocks; for a recording or a simulator "
        "start the node with use_sim_time:=true and let the player publish /clock"
    )
