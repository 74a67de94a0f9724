"""Authentication, authorization and audit: identities, tokens, certificates, roles, limits, the audit log."""
