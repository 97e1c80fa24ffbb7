"""Pictures of prompts: loaded within limits, and put into the tokens of a model."""

from rollfeed.prompts.pictures.fetching import Fetcher
from rollfeed.prompts.pictures.loader import PictureLoader
from rollfeed.prompts.pictures.processor import ModelPictures, takes_pictures

__all__ = ["Fetcher", "ModelPictures", "PictureLoader", "takes_pictures"]
