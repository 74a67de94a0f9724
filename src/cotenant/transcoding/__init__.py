"""The public API as HTTP and JSON, by the annotations in its protos: routes, requests, answers, and OpenAPI."""
