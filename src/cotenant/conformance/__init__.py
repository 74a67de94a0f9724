"""The laws that every policy is held to, as tests: `pytest --pyargs cotenant.conformance --policy NAME`.

Each test is a law; the first line of its docstring is the law in one sentence. The laws of a group are in the module
named after it, those of all groups in `test_every_policy`, those of all policies, which decide, in
`test_deciding_policies`. Cotenant's own policies and runtimes are held to the same tests. They need the extra
`conformance`, those of runtimes the extra `agent` as well.
"""
