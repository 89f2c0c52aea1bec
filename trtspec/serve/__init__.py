"""Serving a built engine through Triton: model repository, model, supervisor, client."""
