"""The teacher of a run."""

from rollfeed.app.teaching.teacher import check_teacher, entered, make_teacher, no_pictures_of_teacher, scorer_of

__all__ = ["check_teacher", "entered", "make_teacher", "no_pictures_of_teacher", "scorer_of"]
