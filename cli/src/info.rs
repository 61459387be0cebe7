//! `cualloc info`.

use crate::machine::{self, MachineError};
use crate::options::{DeviceChoice, GlobalOptions};
use crate::output::{self, Output, SCHEMA};
use crate::settings::Settings;
use crate::{Failure, Outcome, text};
use cualloc::Error as AllocatorError;
use cualloc::allocator::{Allocator, Config};
use cualloc::driver::{Context, Device, Driver, DriverError, MemoryProperties, sys};
use serde::Serialize;

/// What `--json` writes.
#[derive(Serialize)]
struct Info {
    schema: u32,
    version: &'static str,
    /// What `CUALLOC_CONFIG` says; null if it is not set.
    config: Option<String>,
    /// Of the GPU; null without one, and with `--device sim`.
    driver: Option<DriverInfo>,
    /// Why there is no driver: the error, then its sources.
    driver_error: Option<Vec<String>>,
    /// Null with `--device cuda`.
    simulator: Option<DriverInfo>,
}

#[derive(Serialize)]
struct DriverInfo {
    /// The library the functions come from; null for the simulator.
    library: Option<String>,
    version: String,
    devices: Vec<DeviceInfo>,
}

#[derive(Serialize)]
struct DeviceInfo {
    ordinal: usize,
    name: String,
    uuid: Option<String>,
    pci_bus_id: Option<String>,
    total_memory_bytes: u64,
    /// Bytes of the smallest piece of mapped memory; null without virtual memory management.
    granularity_bytes: Option<usize>,
    virtual_memory_management: bool,
    memory_pools: bool,
    exports: Vec<&'static str>,
    gpu_direct_rdma: bool,
    /// Whether memory is the same through two addresses, as tested now: passed, failed or not run.
    views_test: &'static str,
    peers: Vec<usize>,
}

pub fn run(global: &GlobalOptions, output: &mut Output) -> Outcome {
    let choice = global.device();
    global.check_simulator()?;
    let settings = Settings::read(None, false)?;
    let mut info = Info {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        config: settings.text().map(str::to_owned),
        driver: None,
        driver_error: None,
        simulator: None,
    };
    let mut well = true;
    if choice != DeviceChoice::Sim {
        match real() {
            Ok(driver) => info.driver = Some(driver),
            Err(error) => {
                info.driver_error = Some(error);
                well = choice != DeviceChoice::Cuda;
            }
        }
    }
    if choice != DeviceChoice::Cuda {
        info.simulator = Some(simulated(global.sim_memory())?);
    }
    if output.json {
        output.json(&info)?;
    } else {
        write(&info, output)?;
    }
    Ok(well)
}

/// Of the GPU, or why it is not there.
fn real() -> Result<DriverInfo, Vec<String>> {
    let driver = Driver::load().map_err(|error| machine::load_messages(&error))?;
    describe(&driver).map_err(|error| text::messages(&error))
}

fn simulated(memory: u64) -> Result<DriverInfo, Failure> {
    let simulator = machine::simulator(memory)?;
    let driver = simulator.driver().map_err(MachineError::NoDriver)?;
    Ok(describe(&driver).map_err(MachineError::Driver)?)
}

fn describe(driver: &Driver) -> Result<DriverInfo, DriverError> {
    let version = driver.version();
    let count = driver.device_count()?;
    let mut devices = Vec::with_capacity(count);
    for ordinal in 0..count {
        devices.push(device(&driver.device(ordinal)?, count)?);
    }
    Ok(DriverInfo {
        library: driver.library().map(str::to_owned),
        version: format!("{}.{}", version / 1000, version % 1000 / 10),
        devices,
    })
}

fn device(device: &Device, count: usize) -> Result<DeviceInfo, DriverError> {
    let virtual_memory_management = device.supports_vmm()?;
    let yes = |attribute| device.attribute(attribute).is_ok_and(|value| value != 0);
    let mut exports = Vec::new();
    if virtual_memory_management && yes(HANDLE_TYPE_POSIX) {
        exports.push("posix file descriptor");
    }
    if virtual_memory_management && yes(HANDLE_TYPE_FABRIC) {
        exports.push("fabric");
    }
    let mut peers = Vec::new();
    for ordinal in (0..count).filter(|ordinal| *ordinal != device.ordinal()) {
        if device.can_access_peer(&device.driver().device(ordinal)?)? {
            peers.push(ordinal);
        }
    }
    let granularity_bytes = if virtual_memory_management {
        Some(granularity(device)?)
    } else {
        None
    };
    Ok(DeviceInfo {
        ordinal: device.ordinal(),
        name: device.name()?,
        uuid: device.uuid()?.map(uuid),
        pci_bus_id: device.pci_bus_id()?,
        total_memory_bytes: device.total_memory()?,
        granularity_bytes,
        virtual_memory_management,
        memory_pools: device.supports_pools()?,
        exports,
        gpu_direct_rdma: yes(GPU_DIRECT_RDMA),
        views_test: views_test(device),
        peers,
    })
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
    let mut text = String::from("GPU-");
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text
}

fn write(info: &Info, output: &mut Output) -> std::io::Result<()> {
    output.line(&format!("cualloc {}", info.version))?;
    if let Some(config) = &info.config {
        output.line(&format!("CUALLOC_CONFIG {}", text::visible(config)))?;
    }
    match (&info.driver, &info.driver_error) {
        (Some(driver), _) => write_driver("CUDA driver", driver, output)?,
        (None, Some(messages)) => {
            output.line("no CUDA driver")?;
            for (depth, message) in messages.iter().enumerate() {
                for line in message.lines() {
                    output.line(&format!("{:indent$}{line}", "", indent = 2 * depth + 2))?;
                }
            }
        }
        (None, None) => {}
    }
    match &info.simulator {
        Some(driver) => write_driver("simulator, as driver", driver, output),
        None => Ok(()),
    }
}

fn write_driver(name: &str, driver: &DriverInfo, output: &mut Output) -> std::io::Result<()> {
    output.line(&format!("{name} {}", driver.version))?;
    if let Some(library) = &driver.library {
        output.line(&format!("  library {library}"))?;
    }
    for device in &driver.devices {
        output.line(&format!("  device {}: {}", device.ordinal, device.name))?;
        if output.quiet {
            continue;
        }
        let some = |text: &Option<String>| text.clone().unwrap_or_else(|| "unknown".to_owned());
        let able = |able: bool| if able { "yes" } else { "no" };
        let list = |list: Vec<String>| match list.is_empty() {
            true => "none".to_owned(),
            false => list.join(", "),
        };
        let mapped = match device.granularity_bytes {
            Some(bytes) => format!("yes, in pieces of {} KiB", bytes >> 10),
            None => "no".to_owned(),
        };
        for (name, value) in [
            ("uuid", some(&device.uuid)),
            ("PCI bus", some(&device.pci_bus_id)),
            (
                "memory",
                format!("{} MiB", output::mebibytes(device.total_memory_bytes)),
            ),
            ("virtual memory management", mapped),
            ("memory pools", able(device.memory_pools).to_owned()),
            (
                "exports",
                list(device.exports.iter().map(ToString::to_string).collect()),
            ),
            ("GPUDirect RDMA", able(device.gpu_direct_rdma).to_owned()),
            ("test of views", device.views_test.to_owned()),
            (
                "peers",
                list(device.peers.iter().map(ToString::to_string).collect()),
            ),
        ] {
            output.line(&format!("    {name:<26} {value}"))?;
        }
    }
    Ok(())
}

const HANDLE_TYPE_POSIX: sys::CUdevice_attribute =
    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
const HANDLE_TYPE_FABRIC: sys::CUdevice_attribute =
    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED;
const GPU_DIRECT_RDMA: sys::CUdevice_attribute =
    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
