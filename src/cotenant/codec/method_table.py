"""The rules of all methods of the API. Generated from the options in protos/ by `make docs`; do not edit."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cotenant.codec.method_rules import MethodRules

METHOD_RULES: Mapping[str, MethodRules] = MappingProxyType(
    {
        "/cotenant.agent.v1.AgentService/Connect": MethodRules(
            {
                "agent": "OWN_NODE",
            },
            route="LEADER",
            audited=True,
            streams=True,
        ),
        "/cotenant.agent.v1.AgentService/UploadOutput": MethodRules(
            {
                "agent": "OWN_NODE",
            },
            route="LEADER",
            streams=True,
        ),
        "/cotenant.agent.v1.AgentService/ServeSession": MethodRules(
            {
                "agent": "OWN_NODE",
            },
            route="LEADER",
            streams=True,
        ),
        "/cotenant.agent.v1.SampleService/StreamSamples": MethodRules(
            {
                "agent": "OWN_NODE",
            },
            route="NODE",
            streams=True,
        ),
        "/cotenant.internal.v1.ObservationService/Observe": MethodRules(
            {
                "service": "ANY",
            },
            route="LEADER",
        ),
        "/cotenant.internal.v1.PlacementService/PlanPlacement": MethodRules(
            {
                "service": "ANY",
            },
            route="LEADER",
            has_request_id=True,
            deadline_seconds=30,
        ),
        "/cotenant.internal.v1.PlacementService/StopAttempts": MethodRules(
            {
                "service": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
        ),
        "/cotenant.internal.v1.PlacementService/ResizeReplicas": MethodRules(
            {
                "service": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
        ),
        "/cotenant.internal.v1.PlacementService/AdviseAttempts": MethodRules(
            {
                "service": "ANY",
            },
            route="LEADER",
            retried=True,
        ),
        "/cotenant.internal.v1.PlacementService/WatchAttempts": MethodRules(
            {
                "service": "ANY",
            },
            route="LEADER",
            streams=True,
        ),
        "/cotenant.internal.v1.PlacementService/ForgetAttempts": MethodRules(
            {
                "service": "ANY",
            },
            route="LEADER",
            retried=True,
        ),
        "/cotenant.internal.v1.PlacementService/ForecastStarts": MethodRules(
            {
                "service": "ANY",
            },
            route="LEADER",
            retried=True,
            deadline_seconds=15,
        ),
        "/cotenant.internal.v1.PlacementService/GetCapacity": MethodRules(
            {
                "operator": "ANY",
                "service": "ANY",
            },
            route="LEADER",
            retried=True,
        ),
        "/cotenant.internal.v1.PlacementService/ReadAttemptLogs": MethodRules(
            {
                "service": "ANY",
            },
            route="LEADER",
            streams=True,
        ),
        "/cotenant.internal.v1.PlacementService/OpenAttemptSession": MethodRules(
            {
                "service": "ANY",
            },
            route="LEADER",
            streams=True,
        ),
        "/cotenant.v1.AdviceService/PlanJobs": MethodRules(
            {
                "viewer": "ANY",
                "user": "ANY",
                "tenant-admin": "ANY",
                "operator": "ANY",
            },
            route="ANY",
            retried=True,
            deadline_seconds=60,
        ),
        "/cotenant.v1.ArrayService/CreateArray": MethodRules(
            {
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.ArrayService/GetArray": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            retried=True,
        ),
        "/cotenant.v1.ArrayService/ListArrays": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            retried=True,
        ),
        "/cotenant.v1.ArrayService/CancelArray": MethodRules(
            {
                "user": "OWN_JOBS",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.ArrayService/SuspendArray": MethodRules(
            {
                "user": "OWN_JOBS",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.ArrayService/ResumeArray": MethodRules(
            {
                "user": "OWN_JOBS",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.ContentionService/ListIncidents": MethodRules(
            {
                "viewer": "ALL_TENANTS",
                "user": "ALL_TENANTS",
                "tenant-admin": "ALL_TENANTS",
                "operator": "ANY",
            },
            route="NODE",
            retried=True,
        ),
        "/cotenant.v1.ContentionService/ListSamples": MethodRules(
            {
                "viewer": "ALL_TENANTS",
                "user": "ALL_TENANTS",
                "tenant-admin": "ALL_TENANTS",
                "operator": "ANY",
            },
            route="NODE",
            retried=True,
        ),
        "/cotenant.v1.FolderService/FindMissingChunks": MethodRules(
            {
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            retried=True,
            deadline_seconds=30,
        ),
        "/cotenant.v1.FolderService/WriteChunks": MethodRules(
            {
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            retried=True,
            deadline_seconds=60,
        ),
        "/cotenant.v1.FolderService/CommitFolder": MethodRules(
            {
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            deadline_seconds=60,
        ),
        "/cotenant.v1.FolderService/ReadChunks": MethodRules(
            {
                "agent": "OWN_NODE",
            },
            route="LEADER",
            streams=True,
        ),
        "/cotenant.v1.JobService/CreateJob": MethodRules(
            {
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.JobService/GetJob": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="ENDED",
            retried=True,
        ),
        "/cotenant.v1.JobService/ListJobs": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="ENDED",
            retried=True,
        ),
        "/cotenant.v1.JobService/WatchJobs": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            streams=True,
        ),
        "/cotenant.v1.JobService/CancelJob": MethodRules(
            {
                "user": "OWN_JOBS",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.JobService/SuspendJob": MethodRules(
            {
                "user": "OWN_JOBS",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.JobService/ResumeJob": MethodRules(
            {
                "user": "OWN_JOBS",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.JobService/UpdateJob": MethodRules(
            {
                "user": "OWN_JOBS",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.JobService/MoveJob": MethodRules(
            {
                "user": "OWN_JOBS",
                "tenant-admin": "TENANT",
                "operator": "ANY",
                "service": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.JobService/ExplainJob": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            retried=True,
        ),
        "/cotenant.v1.JobService/SimulateJob": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            retried=True,
            deadline_seconds=30,
        ),
        "/cotenant.v1.JobService/SummarizeFailures": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="ENDED",
            retried=True,
        ),
        "/cotenant.v1.JobService/SummarizeUsage": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            retried=True,
            deadline_seconds=60,
        ),
        "/cotenant.v1.JobService/ReadLogs": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            streams=True,
        ),
        "/cotenant.v1.JobService/ReadFiles": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            streams=True,
        ),
        "/cotenant.v1.JobService/OpenSession": MethodRules(
            {
                "user": "OWN_JOBS",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            streams=True,
        ),
        "/cotenant.v1.NodeService/GetNode": MethodRules(
            {
                "viewer": "ANY",
                "user": "ANY",
                "tenant-admin": "ANY",
                "operator": "ANY",
            },
            route="LEADER",
            retried=True,
        ),
        "/cotenant.v1.NodeService/ListNodes": MethodRules(
            {
                "viewer": "ANY",
                "user": "ANY",
                "tenant-admin": "ANY",
                "operator": "ANY",
            },
            route="LEADER",
            retried=True,
        ),
        "/cotenant.v1.NodeService/DrainNode": MethodRules(
            {
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.NodeService/CordonNode": MethodRules(
            {
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.NodeService/UncordonNode": MethodRules(
            {
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.NodeService/ReleaseGpu": MethodRules(
            {
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.NodeService/ForgetNode": MethodRules(
            {
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.PolicyService/ListPolicies": MethodRules(
            {
                "viewer": "ANY",
                "user": "ANY",
                "tenant-admin": "ANY",
                "operator": "ANY",
            },
            route="ANY",
            retried=True,
        ),
        "/cotenant.v1.PredictorService/Estimate": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
                "service": "ANY",
            },
            route="ANY",
            retried=True,
        ),
        "/cotenant.v1.PredictorService/PlanProfile": MethodRules(
            {
                "viewer": "ALL_TENANTS",
                "user": "ALL_TENANTS",
                "tenant-admin": "ALL_TENANTS",
                "operator": "ANY",
                "service": "ANY",
            },
            route="ANY",
            retried=True,
        ),
        "/cotenant.v1.PredictorService/ListProfiles": MethodRules(
            {
                "viewer": "ALL_TENANTS",
                "user": "ALL_TENANTS",
                "tenant-admin": "ALL_TENANTS",
                "operator": "ANY",
            },
            route="ANY",
            retried=True,
        ),
        "/cotenant.v1.ProcessService/GetProcess": MethodRules(
            {
                "viewer": "ANY",
                "user": "ANY",
                "tenant-admin": "ANY",
                "operator": "ANY",
            },
            route="ANY",
            retried=True,
        ),
        "/cotenant.v1.ProcessService/GetCaller": MethodRules(
            {
                "viewer": "ANY",
                "user": "ANY",
                "tenant-admin": "ANY",
                "operator": "ANY",
            },
            route="ANY",
            retried=True,
        ),
        "/cotenant.v1.ScheduleService/CreateSchedule": MethodRules(
            {
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.ScheduleService/GetSchedule": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            retried=True,
        ),
        "/cotenant.v1.ScheduleService/ListSchedules": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            retried=True,
        ),
        "/cotenant.v1.ScheduleService/PauseSchedule": MethodRules(
            {
                "user": "OWN_JOBS",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
        ),
        "/cotenant.v1.ScheduleService/ResumeSchedule": MethodRules(
            {
                "user": "OWN_JOBS",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
        ),
        "/cotenant.v1.ScheduleService/RunSchedule": MethodRules(
            {
                "user": "OWN_JOBS",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.ScheduleService/DeleteSchedule": MethodRules(
            {
                "user": "OWN_JOBS",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
        ),
        "/cotenant.v1.SecretService/SetSecret": MethodRules(
            {
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
        ),
        "/cotenant.v1.SecretService/ListSecrets": MethodRules(
            {
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            retried=True,
        ),
        "/cotenant.v1.SecretService/DeleteSecret": MethodRules(
            {
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
        ),
        "/cotenant.v1.SecretService/ReadSecrets": MethodRules(
            {
                "agent": "OWN_NODE",
            },
            route="LEADER",
            audited=True,
            retried=True,
        ),
        "/cotenant.v1.TenantService/CreateTenant": MethodRules(
            {
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.TenantService/GetTenant": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            retried=True,
        ),
        "/cotenant.v1.TenantService/ListTenants": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            retried=True,
        ),
        "/cotenant.v1.TenantService/ListTenantUsage": MethodRules(
            {
                "viewer": "TENANT",
                "user": "TENANT",
                "tenant-admin": "TENANT",
                "operator": "ANY",
            },
            route="LEADER",
            retried=True,
        ),
        "/cotenant.v1.TenantService/UpdateTenant": MethodRules(
            {
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.TenantService/DeleteTenant": MethodRules(
            {
                "operator": "ANY",
            },
            route="LEADER",
            audited=True,
            retried=True,
            has_request_id=True,
        ),
        "/cotenant.v1.TenantService/ListQueues": MethodRules(
            {
                "viewer": "ANY",
                "user": "ANY",
                "tenant-admin": "ANY",
                "operator": "ANY",
            },
            route="LEADER",
            retried=True,
        ),
    }
)
