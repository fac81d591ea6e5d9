"""A user's own table: reading, private schema, encoding, and the choice of a model."""
