"""The queue service: the public job API, tenants, the job life cycle and the scheduling cycle."""
