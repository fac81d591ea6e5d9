"""Which records a step sees."""

from sordino.sampling.draw import Draw, Sampler
from sordino.sampling.foreign import Foreign
from sordino.sampling.poisson import Poisson
from sordino.sampling.shuffled import Shuffled, ShuffledLoader

__all__ = ["Draw", "Foreign", "Poisson", "Sampler", "Shuffled", "ShuffledLoader"]
