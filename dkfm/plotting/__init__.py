"""Plot estimators, spectra and certificates with Matplotlib (the extra ``plot``)."""

from dkfm.plotting.axes import save_picture
from dkfm.plotting.estimator_display import display
from dkfm.plotting.figures import certificates, components, novelty, spectrum
from dkfm.plotting.regions import contours, decision_regions

__all__ = [
    "certificates",
    "components",
    "contours",
    "decision_regions",
    "display",
    "novelty",
    "save_picture",
    "spectrum",
]
