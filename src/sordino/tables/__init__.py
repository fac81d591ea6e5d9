"""A user's own records, mostly tables: reading, private schema, encoding, and how to train on them.

In the order of their use: `reading` (a `table`, `arrays` or images), `schema` (what is public about the columns),
`preparing` (what a schema leaves open is released with noise: `release`, `labels`, `normalising`), `encoding` into a
`dataset`, and `defaults` for model and recipe.
"""
