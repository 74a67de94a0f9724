"""Who calls and what they may do: identities, tokens, certificates, roles, the audit log."""
