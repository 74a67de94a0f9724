// Runs against the mesh in COTENANT_ENDPOINT with COTENANT_TOKEN; see `make test-typescript`.

import assert from "node:assert/strict";
import net from "node:net";
import { test, after } from "node:test";
import { Client, Code, ConnectError, JobPhase, hasEnded, reasonOf } from "@cotenant/client";

const endpoint = process.env.COTENANT_ENDPOINT;
const token = process.env.COTENANT_TOKEN;
const skip = endpoint && token ? false : "no mesh: set COTENANT_ENDPOINT and COTENANT_TOKEN";
const client = skip ? undefined : new Client({ endpoint, token });

const job = (name, script) => ({
  name,
  roles: [{ replicas: 1, resources: { cores: 1 } }],
  command: ["sh", "-c", script],
});

/** A TCP proxy before the mesh, whose connections can be cut. */
async function proxy(target) {
  const [host, port] = target.split(":");
  const open = new Set();
  const server = net.createServer((from) => {
    const to = net.connect(Number(port), host);
    for (const [one, other] of [[from, to], [to, from]]) {
      open.add(one);
      one.pipe(other);
      one.on("error", () => other.destroy());
      one.on("close", () => (open.delete(one), other.destroy()));
    }
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return {
    endpoint: `127.0.0.1:${server.address().port}`,
    cut: () => open.forEach((one) => one.destroy()),
    close: () => (server.close(), open.forEach((one) => one.destroy())),
  };
}

test("a job is submitted, runs and has output", { skip }, async () => {
  const submitted = await client.submit(job("typescript", "echo one; echo two"));
  const ended = await client.wait(submitted.id);
  assert.equal(ended.phase, JobPhase.SUCCEEDED);
  const pieces = [];
  for await (const piece of client.logs(submitted.id, { rank: 0 })) pieces.push(Buffer.from(piece));
  assert.equal(Buffer.concat(pieces).toString(), "one\ntwo\n");
});

test("a retry with the same request id is the same job", { skip }, async () => {
  const first = await client.submit(job("once", "true"), "typescript-once");
  const second = await client.submit(job("once", "true"), "typescript-once");
  assert.equal(second.id, first.id);
  await client.wait(first.id);
});

test("a watch that is cut goes on, and misses nothing", { skip }, async () => {
  const between = await proxy(endpoint);
  after(() => between.close());
  const cautious = new Client({ endpoint: between.endpoint, token });
  const running = await client.submit(job("watched", "sleep 1000"));
  const phases = [];
  for await (const change of cautious.watch({ ids: [running.id] }, { untilEnded: true })) {
    if (!change.job || phases.at(-1) === change.job.phase) continue;
    phases.push(change.job.phase);
    if (change.job.phase === JobPhase.RUNNING) {
      between.cut();
      await client.cancel(running.id); // while the watch is away
    }
    if (hasEnded(change.job)) break;
  }
  assert.equal(phases.at(-1), JobPhase.CANCELLED);
  assert.ok(phases.includes(JobPhase.RUNNING));
});

test("an error has its stable reason", { skip }, async () => {
  await assert.rejects(client.get("none"), (error) => {
    assert.equal(ConnectError.from(error).code, Code.NotFound);
    return reasonOf(error) === "JOB_NOT_FOUND";
  });
});

test("a watch ends with its signal", { skip }, async () => {
  const stop = new AbortController();
  await assert.rejects(async () => {
    for await (const _ of client.watch({}, { signal: stop.signal })) stop.abort();
    stop.abort();
  }, (error) => ConnectError.from(error).code === Code.Canceled);
});
