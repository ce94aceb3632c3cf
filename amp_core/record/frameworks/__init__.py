"""Callbacks for Keras, Lightning and Transformers. The public names are in `amp_core.record.<framework>`.

callback (what all torch frameworks share) · keras, keras_run, keras_values, background_rows · requirements
"""
