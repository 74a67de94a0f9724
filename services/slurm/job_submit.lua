-- Cores of GPU jobs at submission, from a table that `cotenant serve slurm --act cores` writes.
--
-- As the only script: `cotenant slurm-bridge lua > /etc/slurm/job_submit.lua`, and in slurm.conf JobSubmitPlugins=lua.
-- Beside a script of your own: save it as /etc/slurm/cotenant.lua, begin your job_submit.lua with
--     local cotenant = dofile("/etc/slurm/cotenant.lua")
-- and call `cotenant.submit(job_desc, part_list, submit_uid)` in your slurm_job_submit.
--
-- It never refuses or delays a job: it reads one small local file, and whatever goes wrong changes nothing.

local TABLE = "@TABLE@"
local BYTES_MAX = 1048576
local NO_NUMBER = 4294967294 -- NO_VAL; also INFINITE after it
local NO_SMALL_NUMBER = 65534 -- NO_VAL16

local cotenant = {}
local cached = { line = nil, header = nil, rows = nil }

-- Returns a number that its user gave, or nil.
local function given(value)
  if type(value) ~= "number" or value == NO_SMALL_NUMBER or value == NO_SMALL_NUMBER + 1 or value >= NO_NUMBER then
    return nil
  end
  return value
end

local function fields(line)
  local found = {}
  for field in string.gmatch(line .. "\t", "([^\t]*)\t") do
    found[#found + 1] = field
  end
  return found
end

-- Returns the header and the rows by key of a valid table; nil for any other.
function cotenant.parse(text)
  if string.len(text) >= BYTES_MAX or string.sub(text, -5) ~= "\nend\n" then
    return nil
  end
  local header, rows = nil, {}
  for line in string.gmatch(text, "([^\n]*)\n") do
    if not header then
      header = fields(line)
      if header[1] ~= "cotenant-cores" or header[2] ~= "1" or not tonumber(header[3]) or not tonumber(header[4]) then
        return nil
      end
    elseif line ~= "end" then
      local row = fields(line)
      local cpus = tonumber(row[5])
      if cpus and cpus >= 1 and cpus < 65533 and cpus == math.floor(cpus) and tonumber(row[6]) and tonumber(row[7]) then
        local key = table.concat({ row[1], row[2], row[3], row[4] }, "\t")
        rows[key] = { cpus = cpus, default = tonumber(row[6]), limit = tonumber(row[7]), why = row[8] or "" }
      end
    end
  end
  return header, rows
end

-- Returns the header and rows of the table if it is there, whole and fresh; it is parsed once per version.
local function read(now)
  local file = io.open(TABLE, "r")
  if not file then
    return nil
  end
  local first = file:read("*l")
  if first ~= cached.line or not cached.header then
    file:seek("set", 0)
    local text = file:read(BYTES_MAX) or ""
    cached.header, cached.rows = cotenant.parse(text)
    cached.line = cached.header and first or nil
  end
  file:close()
  local header = cached.header
  if not header or now - tonumber(header[3]) > tonumber(header[4]) or tonumber(header[3]) - now > 3600 then
    return nil
  end
  return header, cached.rows
end

-- Returns the GPUs in a list such as gres:gpu:a100:2; nil if it cannot be told.
function cotenant.gpus(text)
  local total = 0
  for part in string.gmatch(text or "", "[^,]+") do
    local rest = string.match(part, "^gres[:/]gpu(.*)$") or string.match(part, "^gpu(.*)$")
    if rest then
      local count = rest == "" and "1" or string.match(rest, "^[:=](%d+)$") or string.match(rest, "^:[%w_%.%-]+[:=](%d+)$")
      if not count and string.match(rest, "^:%a[%w_%.%-]*$") then
        count = "1"
      end
      if not count then
        return nil
      end
      total = total + tonumber(count)
    end
  end
  return total
end

local function default_partition(part_list)
  for name, partition in pairs(part_list or {}) do
    if partition.flag_default == 1 then
      return partition.name or name
    end
  end
  return nil
end

-- Returns the partition and the GPUs of a job whose cores may be chosen; nil for any other.
local function kind(job, part_list)
  local tasks, least, most = given(job.num_tasks), given(job.min_nodes), given(job.max_nodes)
  if not job.script or (tasks or 1) ~= 1 or (least or 1) > 1 or (most or 1) > 1 then
    return nil
  end
  if job.shared == 0 or (job.reservation or "") ~= "" or (job.tres_per_socket or "") ~= "" then
    return nil
  end
  local partition = (job.partition or "") ~= "" and job.partition or default_partition(part_list)
  if not partition or string.find(partition, ",", 1, true) then
    return nil
  end
  for _, text in ipairs({ job.tres_per_node or "", job.tres_per_job or "", job.tres_per_task or "" }) do
    local count = cotenant.gpus(text)
    if not count then
      return nil
    end
    if count > 0 then
      return partition, count
    end
  end
  return nil
end

-- Returns the row for a job and the CPUs that it asked for, if its cores are to change; nil if not.
function cotenant.choice(job, part_list, submit_uid, header, rows)
  local partition, gpus = kind(job, part_list)
  local name = job.name or ""
  if not partition or string.find(name, "[\t\n]") then
    return nil
  end
  local user = given(job.user_id) or submit_uid
  local row = rows[table.concat({ tostring(user), partition, tostring(gpus), name }, "\t")]
  if not row then
    return nil
  end
  local asked = given(job.cpus_per_task)
  if (job.cpus_per_tres or "") ~= "" or (given(job.pn_min_cpus) or 1) > (asked or 1) then
    return nil -- --cpus-per-gpu or --mincpus; -c sets the latter as well
  end
  if asked and header[5] ~= "1" then
    return nil -- its user knows
  end
  if given(job.min_mem_per_cpu) or (header[6] == "1" and not given(job.min_mem_per_node)) then
    return nil -- its memory would change with its CPUs
  end
  local before = asked or row.default
  local minutes = given(job.time_limit)
  if row.cpus == before or (row.cpus < before and minutes and minutes * 60 < row.limit) then
    return nil
  end
  return row, before
end

local function change(job, part_list, submit_uid)
  local header, rows = read(os.time())
  if not header then
    return
  end
  local row, before = cotenant.choice(job, part_list, submit_uid, header, rows)
  if not row then
    return
  end
  local what = string.format("cotenant: cpus %d -> %d: %s", before, row.cpus, row.why)
  if header[7] == "1" then
    slurm.log_info("%s", "dry run, uid " .. tostring(submit_uid) .. ", " .. job.name .. ": " .. what)
    return
  end
  job.cpus_per_task = row.cpus
  job.min_cpus = row.cpus
  if given(job.pn_min_cpus) then
    job.pn_min_cpus = row.cpus
  end
  local comment = job.admin_comment
  job.admin_comment = (comment and comment ~= "") and (comment .. "; " .. what) or what
end

-- Chooses the cores of a job; whatever goes wrong changes nothing.
function cotenant.submit(job_desc, part_list, submit_uid)
  local fine, why = pcall(change, job_desc, part_list, submit_uid)
  if not fine then
    pcall(slurm.log_info, "%s", "cotenant: " .. tostring(why))
  end
end

function slurm_job_submit(job_desc, part_list, submit_uid)
  cotenant.submit(job_desc, part_list, submit_uid)
  return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
  return slurm.SUCCESS
end

return cotenant
