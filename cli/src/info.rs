//! `cualloc info`.

use crate::machine::{self, MachineError};
use crate::options::{DeviceChoice, GlobalOptions};
use crate::output::{self, Output, SCHEMA};
use crate::settings::Settings;
use crate::{Failure, Outcome, text};
use cualloc::Error as AllocatorError;
use cualloc::allocator::{Allocator, Config};
use cualloc::driver::{Context, Device, Driver, DriverError, MemoryProperties, sys};
use serde_json::{Value, json};
use std::io;

pub fn run(global: &GlobalOptions, output: &mut Output) -> Outcome {
    let choice = global.device();
    global.check_simulator()?;
    let settings = Settings::read(&Default::default())?;
    let (mut driver, mut driver_error, mut simulator) = (None, None, None);
    if choice != DeviceChoice::Sim {
        match describe_real() {
            Ok(found) => driver = Some(found),
            Err(messages) => driver_error = Some(messages),
        }
    }
    let well = driver.is_some() || choice != DeviceChoice::Cuda;
    if choice != DeviceChoice::Cuda {
        simulator = Some(describe_simulated(global.sim_memory())?);
    }
    if output.json {
        output.json(&json!({
            "schema": SCHEMA,
            "version": env!("CARGO_PKG_VERSION"),
            "config": settings.text(),
            "driver": driver,
            "driver_error": driver_error,
            "simulator": simulator,
        }))?;
        return Ok(well);
    }
    output.line(concat!("cualloc ", env!("CARGO_PKG_VERSION")))?;
    if let Some(config) = settings.text() {
        output.line(&format!("CUALLOC_CONFIG {}", text::escape(config)))?;
    }
    if let Some(driver) = &driver {
        write_driver("CUDA driver", driver, output)?;
    }
    if let Some(messages) = driver_error {
        output.line("no CUDA driver")?;
        for (depth, message) in messages.iter().enumerate() {
            for line in message.lines() {
                output.line(&format!("{:indent$}{line}", "", indent = 2 * depth + 2))?;
            }
        }
    }
    if let Some(simulator) = &simulator {
        write_driver("simulator, as driver", simulator, output)?;
    }
    Ok(well)
}

fn describe_real() -> Result<Value, Vec<String>> {
    let driver = Driver::load().map_err(|error| machine::load_messages(&error))?;
    describe(&driver).map_err(|error| text::messages(&error))
}

fn describe_simulated(memory: u64) -> Result<Value, Failure> {
    let simulator = machine::simulator(memory)?;
    let driver = simulator.driver().map_err(MachineError::NoDriver)?;
    Ok(describe(&driver).map_err(MachineError::Driver)?)
}

fn describe(driver: &Driver) -> Result<Value, DriverError> {
    let (version, count) = (driver.version(), driver.device_count()?);
    let devices = (0..count).map(|ordinal| device(&driver.device(ordinal)?, count));
    Ok(json!({
        // Null for the simulator.
        "library": driver.library(),
        "version": format!("{}.{}", version / 1000, version % 1000 / 10),
        "devices": devices.collect::<Result<Value, DriverError>>()?,
    }))
}

fn device(device: &Device, count: usize) -> Result<Value, DriverError> {
    let mapped = device.supports_vmm()?;
    let yes = |attribute| device.attribute(attribute).is_ok_and(|value| value != 0);
    let exports = [
        ("posix file descriptor", HANDLE_TYPE_POSIX),
        ("fabric", HANDLE_TYPE_FABRIC),
    ];
    let exports = exports
        .into_iter()
        .filter(|(_, attribute)| mapped && yes(*attribute));
    let mut peers = Vec::new();
    for ordinal in (0..count).filter(|ordinal| *ordinal != device.ordinal()) {
        if device.can_access_peer(&device.driver().device(ordinal)?)? {
            peers.push(ordinal);
        }
    }
    Ok(json!({
        "ordinal": device.ordinal(),
        "name": device.name()?,
        "uuid": device.uuid()?.map(uuid),
        "pci_bus_id": device.pci_bus_id()?,
        "total_memory_bytes": device.total_memory()?,
        // Granularity of mapped memory in bytes.
        "granularity_bytes": if mapped { Some(granularity(device)?) } else { None },
        "virtual_memory_management": mapped,
        "memory_pools": device.supports_pools()?,
        "exports": Vec::from_iter(exports.map(|(name, _)| name)),
        "gpu_direct_rdma": yes(GPU_DIRECT_RDMA),
        // Whether a write through one mapping is visible through another, as tested now: passed, failed or not run.
        "views_test": views_test(device),
        "peers": peers,
    }))
}

fn granularity(device: &Device) -> Result<usize, DriverError> {
    let properties = MemoryProperties::for_device(device)?;
    let context = Context::primary(device)?;
    context.enter()?.granularity(&properties)
}

fn views_test(device: &Device) -> &'static str {
    let tested = Context::primary(device)
        .map_err(AllocatorError::from)
        .and_then(|context| Allocator::with_config(&context, Config::default()))
        .and_then(|allocator| allocator.test_views());
    match tested {
        Ok(result) => result.name(),
        Err(error) => {
            output::error(&format!("the test of views: {}", text::chain(&error)));
            "not run"
        }
    }
}

fn uuid(bytes: [u8; 16]) -> String {
    let hex = format!("{:032x}", u128::from_be_bytes(bytes));
    let [a, b, c, d, e] = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &hex[part]);
    format!("GPU-{a}-{b}-{c}-{d}-{e}")
}

fn write_driver(name: &str, driver: &Value, output: &mut Output) -> io::Result<()> {
    output.line(&format!("{name} {}", format_value(&driver["version"])))?;
    if !driver["library"].is_null() {
        output.line(&format!("  library {}", format_value(&driver["library"])))?;
    }
    for device in driver["devices"].as_array().into_iter().flatten() {
        let (ordinal, name) = (&device["ordinal"], format_value(&device["name"]));
        output.line(&format!("  device {ordinal}: {name}"))?;
        if output.quiet {
            continue;
        }
        let memory = device["total_memory_bytes"].as_u64().unwrap_or(0);
        let mapped = match device["granularity_bytes"].as_u64() {
            Some(bytes) => format!("yes, in pieces of {} KiB", bytes >> 10),
            None => "no".to_owned(),
        };
        for (name, value) in [
            ("uuid", format_value(&device["uuid"])),
            ("PCI bus", format_value(&device["pci_bus_id"])),
            ("memory", format!("{} MiB", output::mebibytes(memory))),
            ("virtual memory management", mapped),
            ("memory pools", format_value(&device["memory_pools"])),
            ("exports", format_value(&device["exports"])),
            ("GPUDirect RDMA", format_value(&device["gpu_direct_rdma"])),
            ("test of views", format_value(&device["views_test"])),
            ("peers", format_value(&device["peers"])),
        ] {
            output.line(&format!("    {name:<26} {value}"))?;
        }
    }
    Ok(())
}

fn format_value(value: &Value) -> String {
    match value {
        Value::Null => "unknown".to_owned(),
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(list) if list.is_empty() => "none".to_owned(),
        Value::Array(list) => Vec::from_iter(list.iter().map(format_value)).join(", "),
        other => other.to_string(),
    }
}

const HANDLE_TYPE_POSIX: sys::CUdevice_attribute =
    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
const HANDLE_TYPE_FABRIC: sys::CUdevice_attribute =
    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED;
const GPU_DIRECT_RDMA: sys::CUdevice_attribute =
    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
