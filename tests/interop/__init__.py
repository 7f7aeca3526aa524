"""A second implementation of the wire, in JavaScript, and the test that runs it."""
