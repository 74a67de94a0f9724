/** Submit, watch and cancel jobs of a Cotenant mesh. */

import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { randomUUID } from "node:crypto";
import { type MessageInitShape } from "@bufbuild/protobuf";
import { Code, ConnectError, createClient, type Client as ServiceClient, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { ErrorInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { JobPhase, JobSpecSchema, type Job } from "./gen/cotenant/v1/job_pb.js";
import { JobFilterSchema, JobService, JobView, type WatchJobsResponse } from "./gen/cotenant/v1/job_service_pb.js";

export { Code, ConnectError } from "@connectrpc/connect";
export { JobPhase, JobKind, type Job, type JobSpec } from "./gen/cotenant/v1/job_pb.js";
export { JobService, JobView } from "./gen/cotenant/v1/job_service_pb.js";

export type JobSpecInit = MessageInitShape<typeof JobSpecSchema>;
export type JobFilterInit = MessageInitShape<typeof JobFilterSchema>;

/** Where the mesh is, and who calls. */
export interface Options {
  /** HOST:PORT of any service of the mesh. */
  endpoint: string;
  /** The API token. */
  token?: string;
  /** PEM files for TLS: the trusted authorities, and a client certificate with its key. */
  tls?: { ca: string; cert?: string; key?: string };
}

/** A change of a job: its present state, or that it no longer matches. */
export type Change = { job: Job; removed?: undefined } | { job?: undefined; removed: string };

const ENDED: ReadonlySet<JobPhase> = new Set([JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED]);
const CUT: ReadonlySet<Code> = new Set([Code.Unavailable, Code.Canceled, Code.Aborted, Code.Internal, Code.Unknown]);
const BEGIN_AGAIN: ReadonlySet<string> = new Set(["REVISION_COMPACTED", "REVISION_UNKNOWN"]);
const RETRY_MS = [200, 500, 1000, 2000, 4000, ...Array<number>(11).fill(5000)]; // a minute: a restart or an election

/** Whether a job has ended. */
export const hasEnded = (job: Job): boolean => ENDED.has(job.phase);

/** The stable reason of an error of the API, such as JOB_NOT_FOUND; "" without one. */
export function reasonOf(error: unknown): string {
  return ConnectError.from(error).findDetails(ErrorInfoSchema)[0]?.reason ?? "";
}

/** A connection to a mesh. */
export class Client {
  /** The calls of the API for jobs, as the protos describe them. */
  readonly jobs: ServiceClient<typeof JobService>;

  constructor(options: Options) {
    const { endpoint, token, tls } = options;
    const authorize: Interceptor = (next) => (request) => {
      if (token) request.header.set("authorization", `Bearer ${token}`);
      return next(request);
    };
    const transport = createGrpcTransport({
      baseUrl: `${tls ? "https" : "http"}://${endpoint}`,
      interceptors: [authorize],
      pingIntervalMs: 10_000,
      ...(tls && {
        nodeOptions: {
          ca: readFileSync(tls.ca),
          ...(tls.cert && { cert: readFileSync(tls.cert) }),
          ...(tls.key && { key: readFileSync(tls.key) }),
        },
      }),
    });
    this.jobs = createClient(JobService, transport);
  }

  /** Submit a job. A retry with the same `requestId` returns the first call's job. */
  async submit(spec: JobSpecInit, requestId: string = randomUUID()): Promise<Job> {
    const request = { spec, requestId };
    return this.retried(async () => present((await this.jobs.createJob(request)).job));
  }

  /** Return a job. */
  async get(id: string): Promise<Job> {
    return this.retried(async () => present((await this.jobs.getJob({ id })).job));
  }

  /** Cancel a job; an ended one does not change. */
  async cancel(id: string): Promise<Job> {
    const request = { id, requestId: randomUUID() };
    return this.retried(async () => present((await this.jobs.cancelJob(request)).job));
  }

  /** Wait until a job has ended, and return it. */
  async wait(id: string, signal?: AbortSignal): Promise<Job> {
    for await (const change of this.watch({ ids: [id] }, { untilEnded: true, ...(signal && { signal }) })) {
      if (change.job && hasEnded(change.job)) return change.job;
    }
    return this.get(id);
  }

  /**
   * Yield each matching job, then each change, until the caller stops, or with `untilEnded` until all have ended.
   *
   * A watch that was cut is resumed from its last revision, so that nothing is missed; a job may be yielded again.
   */
  async *watch(
    filter: JobFilterInit = {},
    options: { untilEnded?: boolean; signal?: AbortSignal } = {},
  ): AsyncGenerator<Change, void> {
    const known = new Set<string>();
    let unseen = new Set<string>();
    let afterRevision = "";
    let failed = 0;
    for (;;) {
      try {
        const request = { filter, untilEnded: options.untilEnded ?? false, view: JobView.FULL, afterRevision };
        for await (const message of this.jobs.watchJobs(request, signalOf(options.signal))) {
          for (const job of message.jobs) {
            known.add(job.id);
            unseen.delete(job.id);
            yield { job };
          }
          for (const id of removed(message, unseen)) {
            unseen.delete(id);
            if (known.delete(id)) yield { removed: id };
          }
          if (message.synced) failed = 0;
          afterRevision = message.revision || afterRevision;
        }
        return;
      } catch (error) {
        if (afterRevision && BEGIN_AGAIN.has(reasonOf(error))) {
          afterRevision = "";
          unseen = new Set(known);
        } else {
          await pause(error, failed++, options.signal);
        }
      }
    }
  }

  /** Yield a job's output as it is written, of all its processes; with `follow`, until the job has ended. */
  async *logs(
    id: string,
    options: { follow?: boolean; rank?: number; tailBytes?: number; signal?: AbortSignal } = {},
  ): AsyncGenerator<Uint8Array, void> {
    const request = {
      id,
      follow: options.follow ?? true,
      tailBytes: BigInt(options.tailBytes ?? 0),
      ...(options.rank !== undefined && { rank: options.rank }),
    };
    for await (const piece of this.jobs.readLogs(request, signalOf(options.signal))) yield piece.data;
  }

  /** Call again after a cut or while there is no leader: calls with a request id, and those that only read. */
  private async retried<T>(call: () => Promise<T>): Promise<T> {
    for (let failed = 0; ; failed++) {
      try {
        return await call();
      } catch (error) {
        if (failed >= 3 || ConnectError.from(error).code !== Code.Unavailable) throw error;
        await sleep(RETRY_MS[failed]);
      }
    }
  }
}

/** The jobs that a message removes; at the end of the initial state also those that it no longer has. */
function removed(message: WatchJobsResponse, unseen: ReadonlySet<string>): string[] {
  return message.synced ? [...message.removedJobIds, ...unseen] : message.removedJobIds;
}

/** Wait before a stream is opened again; throw the error if that does not help. */
async function pause(error: unknown, failed: number, signal?: AbortSignal): Promise<void> {
  const delay = RETRY_MS[failed];
  if (signal?.aborted || delay === undefined || !CUT.has(ConnectError.from(error).code)) throw error;
  await sleep(delay, undefined, signalOf(signal));
}

const signalOf = (signal?: AbortSignal) => (signal ? { signal } : {});

function present(job: Job | undefined): Job {
  if (!job) throw new ConnectError("the answer has no job", Code.Internal);
  return job;
}
