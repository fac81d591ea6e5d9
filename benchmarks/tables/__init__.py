"""Three real tables, learnt from by Sordino and by its peers at the same ε: AUC, accuracy, wall time."""
