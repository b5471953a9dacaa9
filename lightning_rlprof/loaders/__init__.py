"""Traces on disk turned into `lightning_rlprof.spans.Spans`; one file per format."""
