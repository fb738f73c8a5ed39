"""The document that says what a weight version is made of and where its bytes are."""
